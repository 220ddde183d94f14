"""StateSlots: the slots that hold the recurrent states of requests and of checkpoints."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from proa_engine.core.kv.block_pool import BlockPool
from proa_engine.core.request import Request
from proa_engine.core.types import NO_STATE, Block, StateSteps


class StateSlots:
    """A pool of slots, each with the states of one request at one position.

    A request owns one slot, which its steps read and write. A checkpoint needs the states at its position to stay
    unchanged, but the request's next token would overwrite them. So a step can read one slot and write another: the
    slot that is no longer written becomes the checkpoint's. Nothing is copied, neither for a checkpoint nor for a hit.
    A step can write several slots, each at its position, so no chunk of a prompt is cut short either.

    The rows of a step run at the same time. So a slot that one row of a step reads must not be given to another row of
    that step: `free_read` frees those only when all rows are planned.
    """

    def __init__(self, num_slots: int, evict: Callable[[Block], None]) -> None:
        """Raises `ValueError` for fewer than two slots: a starting request may read a cached slot and write its own."""
        if num_slots < 2:
            raise ValueError(f"recurrent states need at least 2 slots, got {num_slots}")
        self.pool = BlockPool(num_slots, evict)
        self._reads: list[Block] = []  # slots to free when all rows of the step are planned

    def can_allocate(self, snapshot: Block | None) -> bool:
        """Whether a slot of its own can be allocated to a request that continues from `snapshot`."""
        return self.pool.num_free_blocks > (snapshot is not None and snapshot.ref_count == 0)

    def allocate(self, request: Request, snapshot: Block | None) -> None:
        """Allocate a slot to the request. Its first step reads `snapshot`, if there is one."""
        if snapshot is not None:
            self.pool.touch([snapshot])
        (request.state,) = self.pool.get_new_blocks(1)
        request.state_read = snapshot

    def free(self, request: Request) -> None:
        assert request.state is not None
        self.pool.free_blocks([request.state])
        request.state = None

    def plan(
        self, request: Request, start: int, positions: Iterable[int], snapshot: Callable[[Request, int, Block], None]
    ) -> StateSteps | None:
        """Plan a row that computes the tokens from `start`, and call `snapshot` for each checkpoint at `positions`.

        A checkpoint is skipped if no slot is free. Returns None if the row reads and writes only the request's own
        slot.
        """
        assert request.state is not None
        read, writes = request.state if start else None, list[tuple[int, int]]()
        if request.state_read is not None:
            read, request.state_read = request.state_read, None
            self._reads.append(read)
        for position in positions:
            if self.pool.num_free_blocks == 0:
                break
            (slot,) = self.pool.get_new_blocks(1)
            if position == start:  # the checkpoint takes the slot, and the request writes another one
                slot, request.state = request.state, slot
            else:
                writes.append((position, slot.block_id))
            snapshot(request, position, slot)
            self._reads.append(slot)
        if read is request.state and not writes:
            return None
        writes.append((request.num_computed_tokens, request.state.block_id))
        return StateSteps(NO_STATE if read is None else read.block_id, tuple(writes))

    def free_read(self) -> None:
        """Free the slots that no step after this one reads for its request. They stay cached until they are allocated
        again."""
        self.pool.free_blocks(self._reads)
        self._reads = []

    def check_integrity(self, running: Sequence[Request], held_states: Sequence[Block]) -> None:
        """Raises `AssertionError` unless each running request has a slot of its own, and the only other slots in use
        are `held_states`."""
        self.pool.check_integrity()
        assert not self._reads
        assert not any(request.state_read for request in running)
        states = [request.state for request in running if request.state is not None]
        assert len(states) == len(running)
        assert all(slot.cached_in is None for slot in states), "a slot in use is a checkpoint's"
        assert len(set(states)) == len(states), "two requests have the same slot"
        references = Counter([*states, *held_states])
        assert references == {slot: slot.ref_count for slot in self.pool.blocks if slot.ref_count}
