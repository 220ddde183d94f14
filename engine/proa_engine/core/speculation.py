"""Speculation in the core: how many draft tokens a step may check, and what is taken back of those that did not hold.

How far a request really is, only the device knows until a step's result arrives. The plan works with the furthest it
can be: every draft in flight counts as accepted, and what was not is taken back when the host learns it. Knows
nothing of what proposes the drafts.
"""

from collections.abc import Sequence

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.core.request import Request
from proa_engine.core.types import ModelRunnerOutput


class SpeculatingRequest(Request):
    """A request whose decodes carry up to `max_drafts` draft tokens, checked together with its last token."""

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
        """As many drafts as keep within the limit however many of those in flight are accepted.

        None at all where the request may have come to its end already.
        """
        num_left = len(self.token_ids) + self.num_placeholders - self.num_computed_tokens
        if num_left == 1:
            num_left += self.max_drafts
        return min(num_left, self.max_num_tokens - 1 - self.num_computed_tokens)

    @property
    def num_slots_to_join(self) -> int:
        return min(len(self.token_ids) + self.max_drafts, self.max_num_tokens - 1)

    @property
    def max_placeholders(self) -> int:
        return 2 * (1 + self.max_drafts)

    def plan(self, num_tokens: int) -> None:
        self.num_computed_tokens += num_tokens
        num_ahead = self.num_computed_tokens - len(self.token_ids) - self.num_placeholders
        if num_ahead >= 0:
            self.num_placeholders += num_ahead + 1

    def take_back(self, num_tokens: int) -> None:
        """So many of the oldest step's drafts were not accepted."""
        self.num_placeholders -= num_tokens
        if self.num_computed_tokens:  # else it was preempted meanwhile
            self.num_computed_tokens -= num_tokens


class DraftCounter:
    """Settles the drafts of steps that reached the host, and counts since the start."""

    def __init__(self) -> None:
        self.num_drafts = 0  # times that a request had drafts in a step
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def settle(self, requests: Sequence[Request], result: ModelRunnerOutput) -> None:
        """Take back what was planned for drafts that were not accepted; before the requests get their tokens."""
        if not result.drafts:
            return
        for request, token_ids, drafts in zip(requests, result.sampled_token_ids, result.drafts, strict=True):
            if drafts.planned == 0 or request.is_finished:
                continue
            assert isinstance(request, SpeculatingRequest)
            request.take_back(1 + drafts.planned - len(token_ids))
            self.num_drafts += drafts.proposed > 0
            self.num_draft_tokens += drafts.proposed
            self.num_accepted_tokens += len(token_ids) - 1


def can_speculate(params: SamplingParams) -> bool:
    """Whether a token's choice depends on nothing that only the host works out from the number of tokens before it."""
    return params.min_tokens == 0 and all(len(word) == 1 for word in params.bad_words_token_ids)
