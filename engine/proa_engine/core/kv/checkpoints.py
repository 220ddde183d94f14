"""Checkpoints: which prefixes of a request are checkpointed, for models with sliding windows or recurrent states."""

from collections.abc import Callable, Sequence

from proa_engine.core.kv.block_tables import BlockTables
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.pools import Pools
from proa_engine.core.request import CACHES_NOTHING, Request
from proa_engine.core.types import Block

CheckpointPositions = Callable[[int, int, int, int, int, int], tuple[int, ...]]
"""`proa.blocks.checkpoint_positions`, which gateways use too, to know where hits end."""


def nowhere(*_: int) -> tuple[int, ...]:
    """The positions without prefix caching: no checkpoints."""
    return ()


class Checkpoints:
    """Makes the checkpoints of requests at `positions`, and one at each request's end.

    A checkpoint costs memory, and with recurrent states a slot, so a prompt has few: behind its last full block, for
    the next turn of a conversation; where it diverges from what others have computed, for the third request with that
    prefix; and at multiples of a large interval. A checkpoint is skipped if there is no room for it.
    """

    def __init__(
        self,
        groups: CacheGroups,
        positions: CheckpointPositions,
        device: Pools,
        tables: BlockTables,
    ) -> None:
        self._groups = groups
        self._block_size = groups.block_size
        self._interval = groups.checkpoint_interval
        self._positions = positions
        self._cache = device.cache
        self._pool = device.blocks
        self._tables = tables

    def plan(self, request: Request, num_hit: int, num_known: int) -> None:
        """Set the checkpoints of a starting request with a hit of `num_hit` tokens, of which table 0 has `num_known`
        cached."""
        request.checkpoints = self._positions(
            request.num_tokens, num_hit, num_known, self._interval, self._groups.min_junction, self._block_size
        )

    def due(self, request: Request, start: int, num_before: int) -> list[int]:
        """Return the positions of the checkpoints to make in the step that computes the tokens from `start`, ascending.

        A checkpoint is due in the step that computes the token behind it, because the host then knows the tokens before
        it. With drafts in flight it does not; the checkpoint is then due when the block before it is cached.
        `num_before` is the number of blocks that were cached before this step.

        With recurrent states, the row itself writes those of the checkpoint, or its slot has them already. A row with
        drafts writes none, and no later one says of how many tokens its are. So after its first token with drafts
        behind it a request makes no checkpoint until it starts again.
        """
        if request.num_cached_blocks == CACHES_NOTHING:
            return []
        end = request.num_computed_tokens
        if end in request.checkpoints or (self._interval > 0 and end % self._interval == 0):
            request.num_slots = end  # so that the next step asks the manager even if it needs no block
        low = max(min(start, (num_before + 1) * self._block_size), 1)
        high = min(end - 1, request.num_cached_blocks * self._block_size)
        if request.states:
            low, high = max(low, start), min(high, request.drafted_from)
        if high < low:
            return []
        positions = [position for position in request.checkpoints if low <= position <= high]
        if self._interval and high // self._interval * self._interval >= low:
            multiples = range(-(-low // self._interval) * self._interval, high + 1, self._interval)
            positions = sorted({*positions, *multiples})
        return [position for position in positions if self._can_add(request, position)]

    def add(self, request: Request, position: int, states: Sequence[Block]) -> None:
        """Make a checkpoint of the request's blocks before `position`. `states` is the slot with the states there."""
        window_blocks = self._tables.window_blocks(request, position)
        assert window_blocks is not None
        hashes, end = request.block_hashes, position // self._block_size
        hashed = [list(zip(hashes[end - len(tail) : end], tail, strict=True)) for tail in window_blocks]
        for tail in self._cache.add_checkpoint(hashes[end - 1], hashed, states).window_blocks:
            for block in tail:
                self._pool.refresh(block)

    def last_position(self, request: Request) -> int:
        """Return where to make a checkpoint at the end of a request whose full blocks are cached; 0: nowhere.

        With recurrent states, 0 unless the last computed token ends a block and no row has had drafts: the request's
        slot has the states after it.
        """
        position = min(request.num_computed_tokens, request.num_tokens) // self._block_size * self._block_size
        if position == 0 or request.num_cached_blocks == CACHES_NOTHING:
            return 0
        if request.states and (position != request.num_computed_tokens or request.drafted_from < position):
            return 0
        return position if self._can_add(request, position) else 0

    def _can_add(self, request: Request, position: int) -> bool:
        """Whether there is no checkpoint at `position` yet, and the request still holds the blocks that it needs."""
        is_known = request.block_hashes[position // self._block_size - 1] in self._cache.checkpoints
        return not is_known and self._tables.window_blocks(request, position) is not None
