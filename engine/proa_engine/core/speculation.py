"""Speculative decoding in the core: how many draft tokens a step verifies, and what happens to rejected ones.

Until a step's result arrives, only the device knows how many drafts were accepted. The scheduler works with the upper
bound: drafts in flight count as accepted, and rejected ones are subtracted when the result arrives.
"""

from collections.abc import Sequence

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.core.request import Request
from proa_engine.core.types import ModelRunnerOutput


class SpeculatingRequest(Request):
    """A request whose decode steps carry up to `max_drafts` draft tokens, verified together with its last token."""

    __slots__ = ("max_drafts",)

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        order: tuple[int, ...],
        max_num_tokens: int,
        eos_token_ids: frozenset[int],
        max_drafts: int,
    ) -> None:
        super().__init__(request, order=order, max_num_tokens=max_num_tokens, eos_token_ids=eos_token_ids)
        self.max_drafts = max_drafts

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens and drafts, within the limit even if all drafts in flight are accepted.

        Zero if the request may have reached its end already.
        """
        num_left = self.num_planned_tokens - self.num_computed_tokens
        if num_left == 1:
            num_left += self.max_drafts
        return min(num_left, self.max_num_tokens - 1 - self.num_computed_tokens)

    @property
    def num_slots_to_start(self) -> int:
        return min(len(self.token_ids) + self.max_drafts, self.max_num_tokens - 1)

    @property
    def max_placeholders(self) -> int:
        return 2 * (1 + self.max_drafts)

    def schedule_decode(self) -> bool:
        """False: a decode has drafts, and the workers do not know its upper bound."""
        return False

    def reject_drafts(self, num_tokens: int) -> None:
        """Subtract drafts of the oldest step in flight that were rejected."""
        self.num_planned_tokens -= num_tokens
        if self.num_computed_tokens:  # else it was preempted since
            self.num_computed_tokens -= num_tokens


class DraftCounter:
    """Handles the drafts of finished steps, and counts them since start."""

    def __init__(self) -> None:
        self.num_drafts = 0  # times that a request had drafts in a step
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.num_accepted_per_position: list[int] = []

    def settle(self, requests: Sequence[Request], result: ModelRunnerOutput) -> None:
        """Subtract rejected drafts from their requests. Call it before the requests get the step's tokens."""
        if not result.drafts:
            return
        for request in requests:
            drafts = result.drafts.get(request.request_id)
            if drafts is None or request.is_finished:
                continue
            assert isinstance(request, SpeculatingRequest)
            num_accepted = len(result.sampled_token_ids[request.request_id]) - 1
            request.reject_drafts(drafts.planned - num_accepted)
            self.num_drafts += drafts.proposed > 0
            self.num_draft_tokens += drafts.proposed
            self.num_accepted_tokens += num_accepted
            by_position = self.num_accepted_per_position
            by_position += [0] * (num_accepted - len(by_position))
            for position in range(num_accepted):
                by_position[position] += 1


def check_speculation(num_speculative_tokens: int, *, is_recurrent: bool) -> None:
    """Raises `ValueError` for drafts with recurrent layers: a rejected one cannot be taken out of the state."""
    if num_speculative_tokens and is_recurrent:
        raise ValueError(
            "speculative decoding does not support models with recurrent layers; remove speculative_config"
        )


def can_speculate(params: SamplingParams) -> bool:
    """False if sampling depends on limits that the host derives from the exact number of output tokens."""
    return params.min_tokens == 0 and all(len(word) == 1 for word in params.bad_words_token_ids)
