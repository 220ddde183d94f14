"""Claims: what the conversations of each connected gateway want of the cache, for the others."""

from collections.abc import Callable

from proa.contract import SchedulerStats, SessionClaim


class Claims:
    """By stream. A gateway that retains less than it claims will retain the rest soon, or has lost it to evictions."""

    def __init__(self) -> None:
        self._claims: dict[int, SessionClaim] = {}

    def set(self, stream_id: int, claim: SessionClaim) -> None:
        self._claims[stream_id] = claim

    def end(self, stream_id: int) -> None:
        self._claims.pop(stream_id, None)

    def fill(self, stats: SchedulerStats, stream_id: int, num_retained: Callable[[int], int]) -> None:
        """Set what statistics for a stream say of the others. Blocks that several retain count once.

        `num_retained` returns how many blocks a stream's sessions retain.
        """
        if self._claims.keys() <= {stream_id}:
            return
        others = {each: claim for each, claim in self._claims.items() if each != stream_id}
        num_lacking = sum(claim.num_blocks - num_retained(each) for each, claim in others.items())
        num_blocks = stats.num_retained_blocks - num_retained(stream_id) + num_lacking
        stats.num_claimed_elsewhere = max(num_blocks, 0)
        stats.longest_wait_elsewhere = max(claim.longest_wait for claim in others.values())
