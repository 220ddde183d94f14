"""Adoption: caches what an earlier engine has left in host memory.

Every page and slot is referenced from the start, so that none is allocated before the mover has verified what it holds:
stores wait until pages are released. The mover reports range by range. A range's blocks of table 0 are cached at once,
and its pages are released, except those of tables with windows: they, and all states, are cached and released with the
last range, which has the checkpoints. Then the pages are put into the order of eviction: the oldest first.
"""

from collections.abc import Sequence

from proa_engine.core.kv.mover import Adopted, AdoptedUnit
from proa_engine.core.kv.pools import Pools
from proa_engine.core.types import NO_STATE, Block, StoredCheckpoint


class Adoption:
    """Caches units in the pools of the host, all of whose pages and states must be free. Used on the core's thread
    only. It is done at once if nothing `is_expected`."""

    def __init__(self, host: Pools, *, is_expected: bool) -> None:
        self.is_done = not is_expected
        self.is_stale = False  # the cache was emptied since the start: nothing more is cached
        self._host = host
        self._held = {page.block_id: page for page in host.blocks.blocks} if is_expected else {}
        self._adopted: list[AdoptedUnit] = []  # pages with content
        host.touch(*self.referenced)

    @property
    def referenced(self) -> tuple[Sequence[Block], Sequence[Block]]:
        """The pages and slots that are not released."""
        return list(self._held.values()), () if self.is_done else self._host.states.blocks

    def take(self, adopted: Adopted) -> None:
        """Cache what a range has. After the last one nothing is referenced."""
        assert not self.is_done, "each range is reported once"
        units = [] if self.is_stale else [unit for unit in adopted.units if unit.table >= 0]
        self._adopted += units
        for unit in units:
            if unit.table == 0 and unit.block_hash not in self._host.cache.cached_blocks:
                self._host.cache.add(self._held[unit.place], unit.block_hash)
        of_windows = {unit.place for unit in units if unit.table > 0}
        self._release([page for page in range(adopted.first_page, adopted.end_page) if page not in of_windows])
        if not adopted.is_done:
            return
        for checkpoint in () if self.is_stale else adopted.checkpoints:
            self._add_checkpoint(checkpoint)
        self._release(list(self._held))
        self._host.states.free_blocks(self._host.states.blocks)
        self._sort()
        self.is_done = True

    def _release(self, page_ids: list[int]) -> None:
        self._host.blocks.free_blocks([self._held.pop(page_id) for page_id in page_ids])

    def _add_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Cache a checkpoint, unless there is one or one of its pages was released."""
        pages = [page for tail in checkpoint.tails for page, _ in tail]
        if checkpoint.block_hash in self._host.cache.checkpoints or not all(page in self._held for page in pages):
            return
        tails = [[(block_hash, self._held[page]) for page, block_hash in tail] for tail in checkpoint.tails]
        has_state = self._host.has_states and checkpoint.state != NO_STATE
        states = [self._host.states.blocks[checkpoint.state]] if has_state else []
        self._host.cache.add_checkpoint(checkpoint.block_hash, tails, states)

    def _sort(self) -> None:
        """Make the page that was stored last the last one to be evicted. Pages of one time are a chain in its order,
        which is evicted from its end."""
        for unit in sorted(self._adopted, key=lambda unit: (unit.stored, -unit.place)):
            page = self._host.blocks.blocks[unit.place]
            if page.cached_in is not None and page.block_hash == unit.block_hash:
                self._host.blocks.refresh(page)
