"""StateSlots: the slots that hold the recurrent states of requests and of checkpoints."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from proa_engine.core.kv.block_pool import BlockPool
from proa_engine.core.request import NEVER_DRAFTED, Request
from proa_engine.core.types import NO_STATE, Block, StateSteps

AddCheckpoint = Callable[[Request, int, Sequence[Block]], None]
"""Makes the request's checkpoint at a position, with the slot that has the states there."""


class StateSlots:
    """A pool of slots, each with the states of one request at one position.

    A request owns one slot, which its steps read and write. A checkpoint needs the states at its position to stay
    unchanged, but the request's next token would overwrite them. So a step can read one slot and write another: the
    slot that is no longer written becomes the checkpoint's. Nothing is copied, neither for a checkpoint nor for a hit.
    A step can write several slots, each at its position, so no chunk of a prompt is cut short either.

    The rows of a step run at the same time. So a slot that one row of a step reads must not be given to another row of
    that step: `free_read` frees those only when all rows are planned.

    A row with drafts writes no states behind its own tokens, because some may be rejected: afterwards its slot has the
    states before the row, and the workers compute the accepted tokens again in the next row. See `Checkpoints.due`.
    """

    def __init__(self, pool: BlockPool) -> None:
        """Raises `ValueError` for fewer than two slots: a starting request may read a cached slot and write its own."""
        if pool.num_blocks < 2:
            raise ValueError(f"recurrent states need at least 2 slots, got {pool.num_blocks}")
        self._pool = pool
        self._reads: list[Block] = []  # slots to free when all rows of the step are planned

    @property
    def usage(self) -> float:
        """Share of slots in use, 0 to 1."""
        return self._pool.usage

    def can_allocate(self, cached: Sequence[Block]) -> bool:
        """Whether a slot of its own can be allocated to a request that continues from the slot `cached`, if any."""
        return self._pool.num_free_blocks > self._pool.num_free_of(cached)

    def allocate(self, request: Request, cached: Sequence[Block]) -> None:
        """Allocate a slot to the request. Its first step reads the slot `cached`, if there is one."""
        self._pool.touch(cached)
        request.states, request.states_read = self._pool.get_new_blocks(1), cached
        request.drafted_from = NEVER_DRAFTED

    def free(self, request: Request) -> None:
        self._pool.free_blocks(request.states)
        request.states = ()

    def plan(
        self, request: Request, start: int, positions: Iterable[int], add_checkpoint: AddCheckpoint
    ) -> StateSteps | None:
        """Plan a row that computes the tokens from `start`, and add a checkpoint at each of `positions`.

        A checkpoint is skipped if no slot is free. Returns None if the row reads and writes only the request's own
        slot.
        """
        read, writes = request.states if start else (), list[tuple[int, int]]()
        if request.states_read:
            read, request.states_read = request.states_read, ()
            self._reads += read
        for position in positions:
            if self._pool.num_free_blocks == 0:
                break
            slots: Sequence[Block] = self._pool.get_new_blocks(1)
            if position == start:  # the checkpoint takes the slot, and the request writes another one
                slots, request.states = request.states, slots
            else:
                writes.append((position, slots[0].block_id))
            add_checkpoint(request, position, slots)
            self._reads += slots
        if read is request.states and not writes:
            return None
        writes.append((request.num_computed_tokens, request.states[0].block_id))
        return StateSteps(slot_of(read), tuple(writes))

    def free_read(self) -> None:
        """Free the slots that no step after this one reads for its request. They stay cached until they are allocated
        again."""
        self._pool.free_blocks(self._reads)
        self._reads = []

    def check_integrity(self, running: Sequence[Request], held: Sequence[Block]) -> None:
        """Raises `AssertionError` unless each running request has a slot of its own, and the only other slots in use
        are `held`."""
        assert not self._reads
        assert not any(request.states_read for request in running)
        assert all(len(request.states) == 1 for request in running)
        states = [state for request in running for state in request.states]
        assert all(slot.cached_in is None for slot in states), "a slot in use is a checkpoint's"
        assert len(set(states)) == len(states), "two requests have the same slot"
        references = Counter([*states, *held])
        assert references == {slot: slot.ref_count for slot in self._pool.blocks if slot.ref_count}


class NoStateSlots:
    """The slots of a model without recurrent layers. Its checkpoints have the blocks behind windows only."""

    usage = 0.0

    def can_allocate(self, cached: Sequence[Block]) -> bool:
        return True

    def allocate(self, request: Request, cached: Sequence[Block]) -> None: ...

    def free(self, request: Request) -> None: ...

    def plan(self, request: Request, start: int, positions: Iterable[int], add_checkpoint: AddCheckpoint) -> None:
        for position in positions:
            add_checkpoint(request, position, ())

    def free_read(self) -> None: ...

    def check_integrity(self, running: Sequence[Request], held: Sequence[Block]) -> None:
        assert not any(request.states or request.states_read for request in running)
        assert not held


def slot_of(states: Sequence[Block]) -> int:
    """The slot of a state, as workers and movers know it; NO_STATE if there is none."""
    return states[0].block_id if states else NO_STATE
