"""Requests whose output is constrained by a grammar: each sampled token is accepted by the grammar, or is an error.

Where the grammar allows one token alone, no sampling is needed: forced tokens are known before they are computed, so
that one step computes them all. This is jump-forward decoding (Zheng et al., SGLang, 2023, arXiv:2312.07104), with the
tokens that the masks would allow instead of a new tokenization of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.core.grammar import GrammarCursor
from proa_engine.core.request import Request, RequestStatus


@dataclass(slots=True)
class ForcedCounter:
    num_tokens: int = 0  # that were appended and not sampled, since start


def can_force(params: SamplingParams) -> bool:
    """False if a token needs its logits, could be one that the request's rules forbid, or may end the output."""
    has_rules = params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens
    return params.logprobs is None and params.repetition_detection is None and not has_rules


class ConstrainedRequest(Request):
    """A request with a grammar. `cursor` is set when the grammar is compiled, and is kept during preemption.

    An end token finishes it as any other request; else a complete grammar does, whatever `min_tokens` and `ignore_eos`
    are; else its length. An end of sequence that completes the grammar is a stop, so that it is not part of the text,
    also with `ignore_eos`. A refused token is dropped.

    Tokens that the grammar forces are appended with the token before them. A step that is in flight then samples one of
    them early, without a mask: what it samples is dropped, and the workers are sent the right one. `forced` counts
    forced tokens; None: all tokens are sampled.
    """

    __slots__ = ("_forced", "_has_unsent", "_model_eos_token_ids", "_num_early", "_verdict", "cursor")

    cursor: GrammarCursor  # behind the tokens in `token_ids`
    _verdict: bool | None  # of the cursor on the oldest token in flight; None: not asked yet

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        order: tuple[int, ...],
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        forced: ForcedCounter | None,
    ) -> None:
        super().__init__(request, order=order, max_num_tokens=max_num_tokens, eos_token_ids=eos_token_ids)
        self._model_eos_token_ids = eos_token_ids  # `eos_token_ids` are none with `ignore_eos`
        self._verdict = None
        self._forced = forced
        self._num_early = 0  # tokens in flight that `token_ids` has already
        self._has_unsent = False  # whether `token_ids` ends with forced tokens that the workers do not have

    @property
    def samples(self) -> bool:
        """Whether the last scheduled step samples a token that is not known, as it does not if known ones are left."""
        return self.num_placeholders > 0

    @property
    def unsent_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_computed_tokens :] if self._has_unsent else ()

    def schedule(self, num_tokens: int) -> None:
        super().schedule(num_tokens)
        self._has_unsent = False

    def schedule_decode(self) -> bool:
        return not self._has_unsent and super().schedule_decode()

    def append_plain_token(self, token_id: int) -> bool:
        if self._num_early or not super().append_plain_token(token_id):
            return False
        is_accepted = self.cursor.accept(token_id)
        if is_accepted and not self.cursor.is_complete and not self._forced_ahead():
            return True
        self.token_ids.pop()
        self._verdict = is_accepted
        return False

    def append_token(self, token_id: int) -> bool:
        if self._num_early:
            self._num_early -= 1
            return False
        is_accepted = self.cursor.accept(token_id) if self._verdict is None else self._verdict
        self._verdict = None
        if self._append(token_id, is_accepted):
            return True
        return self._append_forced(self._forced_ahead())

    def _forced_ahead(self) -> Sequence[int]:
        """The tokens that the grammar forces next, if to append them saves a step: one that a step in flight samples
        anyway would not."""
        if self._forced is None:
            return ()
        forced = self.cursor.forced()
        return forced if len(forced) > self.num_placeholders else ()

    def _append_forced(self, forced: Sequence[int]) -> bool:
        """Append these tokens, and those that the grammar forces behind them. Returns whether the request finished."""
        if not forced:
            return False
        assert self._forced is not None
        self._num_early, self._has_unsent = self.num_placeholders, True
        while forced:
            for token_id in forced:
                self.num_planned_tokens = max(self.num_planned_tokens, self.num_tokens + 1)
                self._forced.num_tokens += 1
                if self._append(token_id, self.cursor.accept(token_id)):
                    return True
            forced = self.cursor.forced()
        return False

    def _append(self, token_id: int, is_accepted: bool) -> bool:
        """Append a token. Returns whether the request has finished."""
        if not is_accepted:
            self.status = RequestStatus.FINISHED_ERROR
            self.error = (
                f"the output left its grammar: token {token_id}, its number {self.num_output_tokens + 1}, is not "
                "allowed there, or the grammar is too complex to go on"
            )
            return True
        is_finished = super().append_token(token_id)
        if self.cursor.is_complete and self.status is not RequestStatus.FINISHED_STOPPED:
            is_end = token_id in self._model_eos_token_ids
            self.status = RequestStatus.FINISHED_STOPPED if is_end else RequestStatus.FINISHED_COMPLETE
            return True
        return is_finished


def cursors_to_fill(requests: Sequence[Request], rows: Sequence[int]) -> list[tuple[int, GrammarCursor]]:
    """The cursors of a started step's constrained rows, with their indices.

    Without those of requests that have finished since, or whose next token became known.
    """
    cursors = []
    for row in rows:
        request = requests[row]
        assert isinstance(request, ConstrainedRequest)
        if request.samples and not request.is_finished:
            cursors.append((row, request.cursor))
    return cursors
