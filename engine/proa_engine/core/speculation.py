"""Speculative decoding in the core: how many draft tokens a step verifies, and what happens to rejected ones.

Until a step's result arrives, only the device knows how many drafts were accepted. The scheduler works with the upper
bound: drafts in flight count as accepted, and rejected ones are subtracted when the result arrives.

Ways to draw a draft token from what a drafter computes: a draft is accepted where it equals the model's own sample, so
each way gives the same outputs and only another share of accepted drafts. Greedy proposes the likeliest token. The
others draw with the noise with which the model will draw, at the request's temperature or at half of it: if both are
open to several tokens, equal noise makes them agree (Gumbel coupling, Daliri et al. 2024, arXiv 2408.07978); if the
model is sure and only the drafter is not, they lose to greedy. Which of the two holds depends on model, text and
temperature, so it is measured while running: all ways' first tokens are compared with the sample. A draw with noise of
its own always loses to equal noise, and one above the request's temperature to one at it.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from proa.contract import EngineCoreRequest
from proa_engine.core.counters import DraftCounts
from proa_engine.core.request import Request
from proa_engine.core.timing.draft_depth import DraftDepth
from proa_engine.core.timing.step_costs import RowSizes
from proa_engine.core.types import Drafts, RowOutput

TEMPERATURES = (0.2, 0.5, 0.85)  # ways are compared by range of temperatures, between these
RANGES = ("0-0.2", "0.2-0.5", "0.5-0.85", "0.85-")


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    factor: float  # of the request's temperature


GREEDY, HALF, FULL = Way("greedy", 0.0), Way("half", 0.5), Way("full", 1.0)
# By `draft_sample_method`. Of several, the one that is right most often is used; among equals the first.
WAYS: Mapping[str, tuple[Way, ...]] = {"greedy": (GREEDY,), "probabilistic": (FULL,), "auto": (GREEDY, HALF, FULL)}


def range_of(temperature: float) -> int:
    """Return the index of the temperature's range in `RANGES`."""
    return bisect_right(TEMPERATURES, temperature)


class DraftCounter:
    """Counts the drafts of finished steps since start. `depth` says how many the rows of the next one have."""

    def __init__(self, depth: DraftDepth) -> None:
        self.depth = depth
        self._accepted_before: list[int] = []  # `num_accepted_per_position` before the step that ends
        self._counts = DraftCounts()

    def add(self, drafts: Drafts, num_accepted: int, temperature: float) -> None:
        """Count the drafts of one row of a step."""
        counts = self._counts
        counts.num_planned[drafts.planned] += 1
        for way, matches in enumerate(drafts.matches):
            counts.num_matches[way, range_of(temperature)] += matches
        counts.num_drafts += drafts.proposed > 0
        counts.num_draft_tokens += drafts.proposed
        counts.num_accepted_tokens += num_accepted
        by_position = counts.num_accepted_per_position
        by_position += [0] * (num_accepted - len(by_position))
        for position in range(num_accepted):
            by_position[position] += 1

    @property
    def counts(self) -> DraftCounts:
        counts = self._counts
        return replace(  # other threads read the copies
            counts,
            depth=self.depth.num_drafts,
            num_accepted_per_position=counts.num_accepted_per_position.copy(),
            num_planned=counts.num_planned.copy(),
            num_matches=counts.num_matches.copy(),
        )

    def end_step(self, num_rows: int, sizes: RowSizes, seconds: float) -> None:
        """Count a step all of whose drafts have been added."""
        now, before = self._counts.num_accepted_per_position, self._accepted_before
        accepted = [count - (before[place] if place < len(before) else 0) for place, count in enumerate(now)]
        self.depth.add(num_rows, sizes, accepted, seconds)
        self._accepted_before = list(now)


class SpeculatingRequest(Request):
    """A request whose decode steps carry up to `max_drafts` draft tokens, verified together with its last token.

    It has no slots, so that a class may derive from it and from another one with attributes.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        order: tuple[int, ...],
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        max_drafts: int,
        counter: DraftCounter,
    ) -> None:
        super().__init__(request, order=order, max_num_tokens=max_num_tokens, eos_token_ids=eos_token_ids)
        self.max_drafts = max_drafts
        self._counter = counter
        self._is_exact = False  # whether the position that the workers were told last is no upper bound
        self._num_settled = 0  # rejected draft tokens of the oldest row in flight that are no longer counted

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens and drafts, within the maximum length even if all drafts in flight are accepted.

        Zero if the request reaches its maximum length in that case.
        """
        num_left = self.num_planned_tokens - self.num_computed_tokens
        if num_left == 1:
            num_left += self._counter.depth.num_drafts
        return min(num_left, self.max_num_tokens - 1 - self.num_computed_tokens)

    @property
    def num_slots_to_start(self) -> int:
        return min(len(self.token_ids) + self.max_drafts, self.max_num_tokens - 1)

    @property
    def max_placeholders(self) -> int:
        return 2 * (1 + self.max_drafts)

    def schedule_decode(self) -> bool:
        """Return False with drafts, and until the workers know the position again, as rejected drafts moved it."""
        return self._is_exact and not self._counter.depth.num_drafts and super().schedule_decode()

    def schedule(self, num_tokens: int) -> None:
        self._is_exact = num_tokens == 1 and self.num_placeholders <= 1  # a row with drafts in flight has more
        if self.num_computed_tokens + num_tokens > self.num_planned_tokens:  # drafts
            self.drafted_from = min(self.drafted_from, self.num_computed_tokens)
        super().schedule(num_tokens)

    def settle_drafts(self, num_rejected: int) -> None:
        """Subtract the rejected draft tokens of the row in flight before its result arrives. All tokens that it samples
        are known."""
        self._num_settled = num_rejected
        self.num_computed_tokens -= num_rejected
        self.num_planned_tokens = self.num_tokens

    def append_row(self, row: RowOutput, now: float) -> Sequence[int]:
        if row.drafts is not None:
            num_accepted = len(row.sampled_token_ids) - 1
            num_rejected = row.drafts.planned - num_accepted - self._num_settled
            self._num_settled = 0
            self.num_planned_tokens -= num_rejected
            if self.num_computed_tokens:  # zero if it was preempted meanwhile
                self.num_computed_tokens -= num_rejected
            self._counter.add(row.drafts, num_accepted, self.sampling_params.temperature)
        return super().append_row(row, now)


def can_speculate(request: EngineCoreRequest) -> bool:
    """Return False if the request says so, if sampling depends on rules that the host derives from the exact number of
    output tokens, or if the prompt has embeddings, which cannot be drafts."""
    params = request.sampling_params
    if request.prompt_embeds or params.min_tokens or not params.speculative:
        return False
    return all(len(word) == 1 for word in params.bad_words_token_ids)
