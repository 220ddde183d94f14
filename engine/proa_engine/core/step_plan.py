"""StepPlan: what a step computes, collected while the scheduler decides; IdColumn: ids of its requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proa.contract import EngineCoreOutput, PromptEmbeds
from proa_engine.core.constrained import ConstrainedRequest
from proa_engine.core.kv.encoder_blocks import CrossAudio
from proa_engine.core.request import Request
from proa_engine.core.types import NO_AUDIO, CachedRequestData, EncodedAudio, NewRequestData


class IdColumn:
    """A list of request ids that is the same object as long as the requests are the same.

    A batch of decodes stays the same for many steps. Values derived from its ids are cached by the list's identity,
    which takes no time to compare.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._ids: list[str] = []

    def of(self, requests: list[Request]) -> list[str]:
        if requests != self._requests:  # compares identities
            self._requests, self._ids = requests, [request.request_id for request in requests]
        return self._ids


@dataclass(slots=True)
class StepPlan:
    """The requests of a step and their numbers of tokens."""

    budget_with_decodes: int  # tokens that can still be scheduled, and those of `decodes`
    constrained: Mapping[str, ConstrainedRequest]  # requests with a grammar, by id
    decodes: list[Request] = field(default_factory=list)  # rows of one token
    drafted: list[Request] = field(default_factory=list)  # rows of one token and drafts
    num_drafted_tokens: dict[str, int] = field(default_factory=dict)  # by request id, drafts included
    chunks: list[Request] = field(default_factory=list)  # other rows of several tokens
    num_chunk_tokens: dict[str, int] = field(default_factory=dict)  # by request id
    new_requests: list[NewRequestData] = field(default_factory=list)
    cached_requests: list[CachedRequestData] = field(default_factory=list)
    # Requests that may fill a block, and the first token that each computes.
    block_candidates: list[tuple[Request, int]] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)  # of requests that finished without a step

    @property
    def budget(self) -> int:
        """Number of tokens that can still be scheduled."""
        return self.budget_with_decodes - len(self.decodes)

    @property
    def rows(self) -> list[Request]:
        """The step's requests, those with one token first, then those with drafts, because layers compute each kind
        together."""
        return self.decodes + self.drafted + self.chunks if self.drafted or self.chunks else self.decodes

    def add_known(self, request: Request, num_tokens: int, new_block_ids: Sequence[Sequence[int]]) -> None:
        """Schedule tokens of a request that the workers hold. A decode without a new block is added to `decodes`
        instead."""
        position, token_ids = request.num_computed_tokens, request.unsent_token_ids
        self.cached_requests.append(CachedRequestData(request.request_id, position, new_block_ids, token_ids))
        self._add(request, num_tokens)

    def add_new(self, request: Request, num_tokens: int, block_ids: list[list[int]]) -> None:
        """Schedule tokens of a request that the workers do not hold."""
        data = NewRequestData(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=request.sampling_params,
            lora=request.lora.in_step,
            pooling_params=request.pooling_params,
            trace_headers=request.trace_headers,
            media=request.media.spans,
            prompt_embeds=_uncomputed(request) if request.prompt_embeds else (),
            audio=_encoded(request) if request.encoded else NO_AUDIO,
        )
        self.new_requests.append(data)
        self._add(request, num_tokens)

    def grammar_rows(self) -> list[int]:
        """Return the indices of rows that sample a token under a grammar."""
        ids, constrained = [row.request_id for row in self.rows], self.constrained
        return [index for index, name in enumerate(ids) if name in constrained and constrained[name].samples]

    def _add(self, request: Request, num_tokens: int) -> None:
        self.block_candidates.append((request, request.num_computed_tokens))
        if num_tokens == 1:
            self.decodes.append(request)
        else:
            self.budget_with_decodes -= num_tokens
            has_drafts = request.num_computed_tokens + num_tokens > request.num_planned_tokens
            rows, counts = self.chunks, self.num_chunk_tokens
            if has_drafts:
                rows, counts = self.drafted, self.num_drafted_tokens
            rows.append(request)
            counts[request.request_id] = num_tokens
        request.media.claim(request, num_tokens)
        request.schedule(num_tokens)


def _uncomputed(request: Request) -> Sequence[PromptEmbeds]:
    """Return the prompt embeddings of the tokens that the request has not computed."""
    behind = (each.behind(request.num_computed_tokens) for each in request.prompt_embeds)
    return [each for each in behind if each is not None]


def _encoded(request: Request) -> EncodedAudio:
    assert isinstance(request.media, CrossAudio)
    return EncodedAudio(tuple(block.block_id for block in request.encoded), request.media.num_tokens)
