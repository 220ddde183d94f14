"""Requests whose output is constrained by a grammar. A sampled token that the grammar rejects is an error.

Where the grammar allows only one token, it is not sampled: the core appends such forced tokens before they are
computed, and one step computes them all. This is jump-forward decoding (Zheng et al., SGLang, 2023, arXiv:2312.07104),
but the tokens are those that the masks would allow, where SGLang tokenizes the text again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.core.grammar import GrammarCursor, MaskedSample
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.speculation import DraftCounter, SpeculatingRequest
from proa_engine.core.types import RowOutput


@dataclass(slots=True)
class ForcedCounter:
    num_tokens: int = 0  # appended without being sampled, since start


def can_force(params: SamplingParams) -> bool:
    """Whether tokens that the grammar forces may be appended without sampling.

    Not with log probabilities, which need each token's logits; not with token rules, which may forbid a forced token;
    and not with repetition detection, which may end the output at one.
    """
    return params.logprobs is None and params.repetition_detection is None and not _has_token_rules(params)


class ConstrainedRequest(Request):
    """A request with a grammar. `cursor` is set when the grammar is compiled, and is kept during preemption.

    Checked in this order, the request finishes at an end token, as any other; when the grammar is complete, whatever
    `min_tokens` and `ignore_eos` are; or at its maximum length. If the end-of-sequence token completes the grammar, the
    request is stopped by it also with `ignore_eos`, so that the token is not part of the text. A token that the grammar
    rejects is dropped.

    Forced tokens are appended together with the token before them. A step in flight may then sample one of them early,
    without a mask: its sample is dropped, and the workers are sent the forced token. `forced` counts forced tokens;
    None: all tokens are sampled.
    """

    __slots__ = ("_forced", "_has_unsent", "_model_eos_token_ids", "_num_early", "_verdict", "cursor")

    cursor: GrammarCursor  # has accepted all output tokens in `token_ids`
    _verdict: bool | None  # whether `cursor` accepted the oldest token in flight; None: not checked yet

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
        self._constrain(eos_token_ids, forced)

    def _constrain(self, eos_token_ids: frozenset[int], forced: ForcedCounter | None) -> None:
        """Set the attributes of this class."""
        self._model_eos_token_ids = eos_token_ids  # `eos_token_ids` is empty with `ignore_eos`
        self._verdict = None
        self._forced = forced
        self._num_early = 0  # tokens in flight whose positions have forced tokens in `token_ids` already
        self._has_unsent = False  # whether `token_ids` ends with forced tokens that the workers do not have

    @property
    def samples(self) -> bool:
        """Whether the last scheduled step samples an unknown token. It does not if known tokens are left to compute."""
        return self.num_placeholders > 0

    @property
    def is_behind(self) -> bool:
        """Whether the masks of the last scheduled step depend on tokens that a step before it samples."""
        return self.num_placeholders > 1

    def walk(self, draft_ids: Sequence[int]) -> Sequence[GrammarCursor | int]:
        """Return what each sample of the last scheduled step may be, up to the last that needs a mask; see
        `MaskedSample`. `draft_ids` are the draft tokens of its row. Call it once for each step."""
        return (self.cursor,) if self.samples else ()

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

    def append_row(self, row: RowOutput, now: float) -> Sequence[int]:
        new_ids = super().append_row(row, now)
        if not new_ids or self.is_finished:
            return new_ids
        num_before = self.num_tokens
        self._append_forced(self._forced_ahead())
        return [*new_ids, *self.token_ids[num_before:]]

    def append_token(self, token_id: int) -> bool:
        if self._num_early:
            self._num_early -= 1
            return False
        is_accepted = self.cursor.accept(token_id) if self._verdict is None else self._verdict
        self._verdict = None
        return self._append(token_id, is_accepted)

    @property
    def _num_in_flight(self) -> int:
        """Tokens that steps in flight sample at least."""
        return self.num_placeholders

    def _forced_ahead(self) -> Sequence[int]:
        """Return the tokens that the grammar forces next, empty if appending them saves no step because the steps in
        flight sample as many."""
        if self._forced is None:
            return ()
        forced = self.cursor.forced()
        return forced if len(forced) > self._num_in_flight else ()

    def _append_forced(self, forced: Sequence[int]) -> None:
        """Append `forced`, then whatever tokens the grammar forces after them, unless the request finishes before."""
        if not forced:
            return
        assert self._forced is not None
        self._num_early, self._has_unsent = self.num_placeholders, True
        while forced:
            for token_id in forced:
                self.num_planned_tokens = max(self.num_planned_tokens, self.num_tokens + 1)
                self._forced.num_tokens += 1
                if self._append(token_id, self.cursor.accept(token_id)):
                    return
            forced = self.cursor.forced()

    def _append(self, token_id: int, is_accepted: bool) -> bool:
        """Append a token. Returns whether the request has finished."""
        if not is_accepted:
            self.status = RequestStatus.FINISHED_ERROR
            self.error = self._explain(token_id)
            return True
        is_finished = super().append_token(token_id)
        if self.cursor.is_complete and self.status is not RequestStatus.FINISHED_STOPPED:
            is_end = token_id in self._model_eos_token_ids
            self.status = RequestStatus.FINISHED_STOPPED if is_end else RequestStatus.FINISHED_COMPLETE
            return True
        return is_finished

    def _explain(self, token_id: int) -> str:
        """Return a sentence about the rejection of a token."""
        number = self.num_output_tokens + 1
        if reason := self.cursor.matcher.error:
            return f"the output cannot be continued at its token {number} under its grammar: {reason}"
        rules = "" if not _has_token_rules(self.sampling_params) else "; the request's token rules allow none that is"
        return f"the output left its grammar: token {token_id}, its number {number}, is not allowed there{rules}"


class DraftedConstrainedRequest(ConstrainedRequest, SpeculatingRequest):
    """A request with a grammar whose decode steps carry draft tokens.

    Each of a row's samples has a mask, that of the place behind its draft token. So a draft token that the grammar
    refuses is rejected, as no sample equals it, and all samples are those of steps without drafts.

    Forced tokens are appended as without drafts. Tool calls of the built-in model, tokens a step: drafts alone 1.50
    (n-grams) and 2.90 (its drafter), forced tokens alone 1.97, both 2.33 and 3.60. A row that computes forced tokens
    has no drafts, as its drafter has read no states of them. The row in flight when they are appended samples the first
    of them: its masks allow them alone, so its draft tokens tell how many, and the next step computes the others.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        order: tuple[int, ...],
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        forced: ForcedCounter | None,
        max_drafts: int,
        counter: DraftCounter,
    ) -> None:
        SpeculatingRequest.__init__(
            self,
            request,
            order=order,
            max_num_tokens=max_num_tokens,
            eos_token_ids=eos_token_ids,
            max_drafts=max_drafts,
            counter=counter,
        )
        self._constrain(eos_token_ids, forced)
        self._num_drafts = 0  # of the last scheduled step
        # Those of that step's samples that are not appended yet. They know also which masks could not be computed.
        self._cursors: Iterator[GrammarCursor] = iter(())
        self._known: Sequence[int] = ()  # forced tokens that the row in flight samples first, until `walk`

    @property
    def is_behind(self) -> bool:
        return self.num_placeholders > 1 + self._num_drafts

    def schedule(self, num_tokens: int) -> None:
        self._num_drafts = max(self.num_computed_tokens + num_tokens - self.num_planned_tokens, 0)
        super().schedule(num_tokens)

    def walk(self, draft_ids: Sequence[int]) -> Sequence[GrammarCursor | int]:
        known, self._known = self._known, ()
        are_right = [token_id == draft_id for token_id, draft_id in zip(known, draft_ids, strict=False)]
        num_right = [*are_right, False].index(False)
        self._num_early += min(num_right + 1, len(known))
        if num_right < len(known):
            self.settle_drafts(self._num_drafts - num_right)
            self._cursors = iter(())
            return known[: num_right + 1]
        self._has_unsent &= not known  # the row samples them all
        cursors = list(self.cursor.walk(draft_ids[num_right:]))
        self._cursors = iter(cursors)
        return [*known, *cursors]

    def append_token(self, token_id: int) -> bool:
        if not self._num_early:
            self.cursor = next(self._cursors, self.cursor)
        return super().append_token(token_id)

    @property
    def _num_in_flight(self) -> int:
        return min(self.num_placeholders, 1)

    def _append_forced(self, forced: Sequence[int]) -> None:
        is_in_flight, num_before = self.num_placeholders > 0, self.num_tokens
        super()._append_forced(forced)
        self._num_early = 0  # until `walk`
        self._known = self.token_ids[num_before:] if is_in_flight else ()


def _has_token_rules(params: SamplingParams) -> bool:
    lists = params.allowed_token_ids, params.bad_words_token_ids, params.begin_suppress_token_ids
    return bool(params.logit_bias or any(lists) or params.min_tokens)


def constrained_rows(requests: Sequence[Request], rows: Sequence[int]) -> dict[int, ConstrainedRequest]:
    """Return the requests of a step's constrained rows, by row."""
    constrained = {}
    for row in rows:
        request = requests[row]
        assert isinstance(request, ConstrainedRequest)
        constrained[row] = request
    return constrained


def samples_to_mask(
    constrained: Mapping[int, ConstrainedRequest], draft_ids: Mapping[int, Sequence[int]]
) -> list[MaskedSample]:
    """Return the samples of a started step's constrained rows that need masks. Both arguments are by row.

    Rows whose request has finished since, or whose next token became known, are left out.
    """
    samples = list[MaskedSample]()
    for row, request in constrained.items():
        if not request.is_finished:
            allowed = enumerate(request.walk(draft_ids.get(row, [])))
            samples += [MaskedSample(row, place, each) for place, each in allowed]
    return samples
