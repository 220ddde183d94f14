"""StepPlan: builds one step's `SchedulerOutput` while the scheduler decides."""

from collections.abc import Mapping, Sequence

from proa.contract import EngineCoreOutput, PromptEmbeds
from proa_engine.core.constrained import ConstrainedRequest
from proa_engine.core.request import Request
from proa_engine.core.types import (
    CachedRequestData,
    Copies,
    EncoderInput,
    NewRequestData,
    SchedulerOutput,
    StateSteps,
)


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


class StepPlan:
    """The requests of a step and their numbers of tokens. `constrained` has the requests with a grammar, by id."""

    def __init__(self, budget: int, constrained: Mapping[str, ConstrainedRequest]) -> None:
        self.decodes: list[Request] = []  # rows of one token
        self.block_candidates: list[
            tuple[Request, int]
        ] = []  # requests that may fill a block, and the first token that each computes
        self.outputs: list[EngineCoreOutput] = []  # of requests that finished without a step
        self._budget = budget
        self._constrained = constrained
        self._chunks: list[Request] = []  # rows of several tokens
        self._num_chunk_tokens: dict[str, int] = {}
        self._new: list[NewRequestData] = []
        self._cached: list[CachedRequestData] = []

    @property
    def budget(self) -> int:
        """Number of tokens that can still be scheduled."""
        return self._budget - len(self.decodes)

    @property
    def rows(self) -> list[Request]:
        """The step's requests, those with one token first, because decodes are computed together."""
        return self.decodes + self._chunks if self._chunks else self.decodes

    def add_known(self, request: Request, num_tokens: int, new_block_ids: Sequence[Sequence[int]]) -> None:
        """Schedule tokens of a request that the workers hold. A decode without a new block is added to `decodes`
        instead."""
        position, token_ids = request.num_computed_tokens, request.unsent_token_ids
        self._cached.append(CachedRequestData(request.request_id, position, new_block_ids, token_ids))
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
            images=request.images.spans,
            prompt_embeds=_uncomputed(request) if request.prompt_embeds else (),
        )
        self._new.append(data)
        self._add(request, num_tokens)

    def scheduler_output(
        self,
        step: int,
        decode_ids: list[str],
        finished_request_ids: list[str],
        preempted_request_ids: list[str],
        states: Mapping[str, StateSteps],
        freed_images: list[bytes],
        encoder_inputs: list[EncoderInput],
        copies: Copies,
    ) -> SchedulerOutput:
        """Make the step for the executor."""
        return SchedulerOutput(
            step=step,
            new_requests=self._new,
            cached_requests=self._cached,
            decode_request_ids=decode_ids,
            num_chunk_tokens=self._num_chunk_tokens,
            finished_request_ids=finished_request_ids,
            preempted_request_ids=preempted_request_ids,
            grammar_rows=self._grammar_rows() if self._constrained else [],
            states=states,
            freed_images=freed_images,
            encoder_inputs=encoder_inputs,
            copies=copies,
        )

    def _grammar_rows(self) -> list[int]:
        found = ((index, self._constrained.get(row.request_id)) for index, row in enumerate(self.rows))
        return [index for index, request in found if request is not None and request.samples]

    def _add(self, request: Request, num_tokens: int) -> None:
        self.block_candidates.append((request, request.num_computed_tokens))
        if num_tokens == 1:
            self.decodes.append(request)
        else:
            self._budget -= num_tokens
            self._chunks.append(request)
            self._num_chunk_tokens[request.request_id] = num_tokens
        request.images.claim(request, num_tokens)
        request.schedule(num_tokens)


def _uncomputed(request: Request) -> Sequence[PromptEmbeds]:
    """Return the prompt embeddings of the tokens that the request has not computed."""
    behind = (each.behind(request.num_computed_tokens) for each in request.prompt_embeds)
    return [each for each in behind if each is not None]
