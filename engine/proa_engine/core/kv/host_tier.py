"""HostTier: a second prefix cache, in host memory, and the copies between it and the device.

The host has pages, each with the content of one block of one table, and slots of states. They have the same hashes as
on the device and are evicted by the same rules, so `PrefixCache` and `BlockPool` serve both.

Copies are planned with a step and never awaited: those of step N run at any time between the end of step N - 1 and the
start of step N + 1.

    host       plan N: loads, then stores      plan N + 1: requests whose loads were in plan N start
    device     | step N - 1 |    step N    | step N + 1 |
    copies                  |<--- of plan N --->|

A request's blocks are loaded before it starts: it waits until the copies are planned, and then
finds the blocks as an ordinary hit. So a failed load never affects a running request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from proa_engine.core.kv.adoption import Adoption
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.loads import Loads
from proa_engine.core.kv.mover import Adopted
from proa_engine.core.kv.pools import PlannedReferences, Pools
from proa_engine.core.kv.prefix_cache import NO_CHECKPOINT, BlockHashes
from proa_engine.core.kv.stores import Stores
from proa_engine.core.request import Request
from proa_engine.core.types import NO_COPIES, Block, Copies, HostOccupancy


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTierConfig:
    num_pages: int
    num_states: int = 0
    max_step_pages: int = 1 << 20  # copied in one step, both directions together; one unit is always allowed
    state_pages: int = 1  # size of a state in pages
    min_load_tokens: int = 1  # fewer tokens are computed again
    page_bytes: int = 0  # size on one rank
    load_bytes_per_second: float = 0.0  # to the device, of all ranks, as measured at the start; 0: not known
    adopts: bool = False  # host memory may have blocks of an earlier engine, which the mover reports


class HostTier:
    """The host part of an engine's prefix cache: `pools`, into which `stores` copies from `device`, and from which
    `loads` copies. Used on the core's thread only."""

    def __init__(self, config: HostTierConfig, groups: CacheGroups, hashes: BlockHashes, device: Pools) -> None:
        num_states = config.num_states if groups.num_state_slots else 0
        self.pools = host = Pools.of(config.num_pages, num_states, num_windows=len(groups.windows))
        self.kv_events = host.cache.kv_events
        self.serial = 0  # of the last copies
        self.has_planned = False  # whether `end_plan` is to be called
        self.load_bytes_per_second = config.load_bytes_per_second
        self._planned = planned = PlannedReferences()  # until `end_plan`
        self.stores = Stores(device, host, planned, state_pages=config.state_pages)
        self.loads = Loads(
            groups,
            hashes,
            device,
            host,
            planned,
            min_tokens=config.min_load_tokens,
            state_pages=config.state_pages,
        )
        self._adoption = Adoption(host, is_expected=config.adopts)
        self._config = config
        self._hashes = hashes
        self._device = device

    @property
    def usage(self) -> float:
        """Share of the pages that hold cached blocks, 0 to 1."""
        return self._num_cached_pages / self.pools.blocks.num_blocks

    @property
    def has_stores(self) -> bool:
        """Whether a queued block or checkpoint can be stored now.

        While pages are adopted there may be room later: what is computed in the first moments after a start would
        otherwise not be stored at all, because a block is queued once.
        """
        return bool(self.stores.queue) and (self._adoption.is_done or not self.pools.is_full)

    @property
    def occupancy(self) -> HostOccupancy:
        """The current sizes. From any thread, because only lengths are read."""
        return HostOccupancy(
            num_pages=self.pools.blocks.num_blocks,
            num_cached_pages=self._num_cached_pages,
            num_stored_pages=self.stores.num_pages,
            num_loaded_pages=self.loads.num_pages,
            num_loaded_tokens=self.loads.num_tokens,
            num_skipped_stores=self.stores.num_skipped,
            page_bytes=self._config.page_bytes,
        )

    def plan(self) -> Copies:
        """Return the copies of this step, loads first. Call it when all blocks of the step are allocated, before they
        are cached, and `end_plan` after."""
        if not self.stores.queue and not self.loads.by_request:
            return NO_COPIES
        copies, budget = Copies(self.serial + 1), self._config.max_step_pages
        if self.loads.by_request:
            budget = self.loads.plan(copies, budget)
        while self.has_stores and budget > 0:
            budget -= self.stores.plan_next(copies)
        self.serial += bool(copies)
        self.has_planned = True
        return copies

    def end_plan(self) -> None:
        """Drop the plan's references. The device's state slots that it stores can be reallocated only from now on."""
        self._planned.free(self._device, self.pools)
        self.has_planned = False

    def touch(self, block_hashes: Iterable[bytes]) -> list[Block]:
        """Reference the pages of those blocks that are in host memory, and return them."""
        cached = self.pools.cache.cached_blocks
        pages = [cached[block_hash] for block_hash in block_hashes if block_hash in cached]
        self.pools.blocks.touch(pages)
        return pages

    def store(self, request: Request) -> None:
        """Queue the request's cached blocks, and the checkpoint at their end, to be stored. Those that are there become
        the last ones to be evicted. Other blocks are queued when they are computed."""
        block_hashes = list(self._hashes.full_blocks(request))
        if not block_hashes:
            return
        self._refresh(block_hashes)
        on_device, in_host = self._device.cache, self.pools.cache
        for block_hash in block_hashes:
            block = on_device.cached_blocks.get(block_hash)
            if block and block_hash not in in_host.cached_blocks:
                self.stores.add_blocks([(block_hash, block)])
        if block_hashes[-1] in on_device.checkpoints:
            self.stores.add_checkpoint(block_hashes[-1])

    def adopt(self, adopted: Adopted) -> None:
        """Cache what an earlier engine has left in a range of pages."""
        self._adoption.take(adopted)

    def reset(self) -> None:
        """Give up all copies and forget everything, as after a change of weights."""
        self.stores.queue.clear()
        while self.loads.give_up():
            pass
        self.pools.cache.reset()
        self._adoption.is_stale = True

    def check_integrity(
        self, fetched: tuple[Sequence[Block], Sequence[Block]]
    ) -> tuple[Sequence[Block], Sequence[Block]]:
        """Raises `AssertionError` unless exactly the pages and states that unplanned loads will read, those of fetches,
        and those that are still to be adopted are referenced.

        Returns the device's blocks and states that loads reference, once for each load.
        """
        self.pools.check_integrity()
        assert not self.has_planned
        assert not self._planned.pages
        assert not self._planned.states
        assert not self._planned.stored_states
        users = (self.loads.host_references, fetched, self._adoption.referenced)
        for pool, references in zip((self.pools.blocks, self.pools.states), zip(*users, strict=True), strict=True):
            expected = list(chain.from_iterable(references))
            for page in pool.blocks:
                assert page.ref_count == expected.count(page), f"page {page.block_id} has leaked"
        return self.loads.device_references

    @property
    def _num_cached_pages(self) -> int:
        return sum(map(len, (self.pools.cache.cached_blocks, *self.pools.cache.cached_window_blocks)))

    def _refresh(self, block_hashes: Sequence[bytes]) -> None:
        """Make the pages of a prefix, and those of a checkpoint at its end, the last ones to be evicted."""
        self.pools.blocks.free_blocks(self.touch(block_hashes))
        checkpoint = self.pools.cache.checkpoints.get(block_hashes[-1], NO_CHECKPOINT)
        for page in chain.from_iterable(checkpoint.window_blocks):
            self.pools.blocks.refresh(page)
        for state in checkpoint.states:
            self.pools.states.refresh(state)
