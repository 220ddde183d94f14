"""Adoption: caches what an earlier engine has left in host memory.

Every page and slot is referenced from the start, so that none is allocated before the mover has verified what it holds:
stores wait until pages are released. The mover reports range by range. A range's blocks of table 0 are cached at once,
and its pages are released, except those of tables with windows: they, and all states, are cached and released with the
last range, which has the checkpoints. Then the pages are put into the order of eviction: the oldest first.
"""

from proa_engine.core.kv.block_pool import BlockPool
from proa_engine.core.kv.mover import Adopted, AdoptedUnit
from proa_engine.core.kv.prefix_cache import PrefixCache
from proa_engine.core.types import NO_STATE, Block, StoredCheckpoint


class Adoption:
    """Caches units in `cache`. All `pages` and `states` must be free. Used on the core's thread only."""

    def __init__(self, cache: PrefixCache, pages: BlockPool, states: BlockPool | None) -> None:
        self.is_stale = False  # the cache was emptied since the start: nothing more is cached
        self._cache = cache
        self._pages = pages
        self._states = states
        self._held: dict[int, Block] = {page.block_id: page for page in pages.blocks}
        self._adopted: list[AdoptedUnit] = []  # pages with content
        pages.touch(pages.blocks)
        if states is not None:
            states.touch(states.blocks)

    @property
    def referenced(self) -> list[Block]:
        """The pages and slots that are not released."""
        return [*self._held.values(), *([] if self._states is None else self._states.blocks)]

    def take(self, adopted: Adopted) -> bool:
        """Cache what a range has. Returns whether it was the last one; nothing is referenced then."""
        units = [] if self.is_stale else [unit for unit in adopted.units if unit.table >= 0]
        self._adopted += units
        for unit in units:
            if unit.table == 0 and unit.block_hash not in self._cache.cached_blocks:
                self._cache.add(self._held[unit.place], unit.block_hash)
        of_windows = {unit.place for unit in units if unit.table > 0}
        self._release([page for page in range(adopted.first_page, adopted.end_page) if page not in of_windows])
        if not adopted.is_done:
            return False
        for checkpoint in () if self.is_stale else adopted.checkpoints:
            self._add_checkpoint(checkpoint)
        self._release(list(self._held))
        if self._states is not None:
            self._states.free_blocks(self._states.blocks)
        self._sort()
        return True

    def _release(self, page_ids: list[int]) -> None:
        self._pages.free_blocks([self._held.pop(page_id) for page_id in page_ids])

    def _add_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Cache a checkpoint, unless there is one or one of its pages was released."""
        pages = [page for tail in checkpoint.tails for page, _ in tail]
        if checkpoint.block_hash in self._cache.checkpoints or not all(page in self._held for page in pages):
            return
        tails = [[(block_hash, self._held[page]) for page, block_hash in tail] for tail in checkpoint.tails]
        has_state = checkpoint.state != NO_STATE and self._states is not None
        state = self._states.blocks[checkpoint.state] if self._states is not None and has_state else None
        self._cache.add_checkpoint(checkpoint.block_hash, tails, state)

    def _sort(self) -> None:
        """Make the page that was stored last the last one to be evicted. Pages of one time are a chain in its order,
        which is evicted from its end."""
        for unit in sorted(self._adopted, key=lambda unit: (unit.stored, -unit.place)):
            page = self._pages.blocks[unit.place]
            if page.cached_in is not None and page.block_hash == unit.block_hash:
                self._pages.refresh(page)
