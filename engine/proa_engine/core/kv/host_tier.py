"""HostTier: a second prefix cache, in host memory, and the copies between it and the device.

The host has pages, each with the content of one block of one table, and slots of states. They have the same hashes as
on the device and are evicted by the same rules, so `PrefixCache` and `BlockPool` serve both.

Copies are planned with a step and never awaited: those of step N run at any time between the end of step N - 1 and the
start of step N + 1. A request's blocks are loaded before it starts: it waits until the copies are planned, and then
finds the blocks as an ordinary hit. So a failed load never affects a running request.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from proa_engine.core.kv.adoption import Adoption
from proa_engine.core.kv.block_pool import BlockPool
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.mover import Adopted
from proa_engine.core.kv.prefix_cache import BlockHashes, PrefixCache
from proa_engine.core.request import Request
from proa_engine.core.types import NO_COPIES, NO_STATE, Block, Copies, HostOccupancy, StoredCheckpoint

_NUM_FREE_STATES = 2  # device slots that a load needs: for the state that it writes, and the request's own


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


class _Place(NamedTuple):
    """Where the block with this hash is: on the device, in host memory, or in both."""

    block_hash: bytes
    block: Block | None
    page: Block | None


@dataclass(slots=True, eq=False)
class _Unit:
    """What is cached on the device as a whole after its copies: a block of table 0, or a checkpoint."""

    block_hash: bytes
    pages: list[tuple[Block, Block]] = field(default_factory=list)  # to be copied: page and block
    # Of a checkpoint.
    window_blocks: list[list[tuple[bytes, Block]]] = field(default_factory=list)  # hashes and blocks on the device
    state_page: Block | None = None  # of the host
    state: Block | None = None
    is_checkpoint: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    """The load of a request's blocks to the device. Its references are kept until the request starts."""

    blocks: list[Block]
    states: list[Block] = field(default_factory=list)
    units: deque[_Unit] = field(default_factory=deque)  # not planned yet


class HostTier:
    """The host part of an engine's prefix cache. Used on the core's thread only.

    `cache`, `blocks` and `states` are the device's prefix cache and pools, from which it stores and into which it
    loads.
    """

    def __init__(
        self,
        config: HostTierConfig,
        groups: CacheGroups,
        hashes: BlockHashes,
        cache: PrefixCache,
        blocks: BlockPool,
        states: BlockPool | None,
    ) -> None:
        self.cache = PrefixCache(len(groups.windows))
        self.pages = BlockPool(config.num_pages, self.cache.evict)
        self.states = BlockPool(config.num_states, self.cache.evict) if states is not None else None
        self._adoption = Adoption(self.cache, self.pages, self.states) if config.adopts else None
        self.serial = 0  # of the last copies
        self._num_stored_pages = self._num_loaded_pages = 0  # since start
        self._num_loaded_tokens = self._num_skipped_stores = 0
        self._config = config
        self._groups = groups
        self._hashes = hashes
        self._device = cache
        self._device_blocks = blocks
        self._device_states = states
        self._stores: deque[tuple[bytes, Block | None]] = deque()  # block of table 0; None: a checkpoint
        self._loads: dict[Request, _Load] = {}  # by request that has not started
        self._loaded: list[Request] = []
        # Used by the current plan, until `end_plan`.
        self._planned_pages: list[Block] = []
        self._planned_states: list[Block] = []
        self._stored_states: list[Block] = []  # of the device

    @property
    def min_load_tokens(self) -> int:
        """Fewer tokens than these are computed again."""
        return self._config.min_load_tokens

    @property
    def load_bytes_per_second(self) -> float:
        """See `HostTierConfig`."""
        return self._config.load_bytes_per_second

    @property
    def usage(self) -> float:
        """Share of the pages that hold cached blocks, 0 to 1."""
        return self._num_cached_pages / self.pages.num_blocks

    @property
    def has_stores(self) -> bool:
        """Whether a queued block or checkpoint can be stored now."""
        return bool(self._stores) and not self._waits_for_adoption

    @property
    def occupancy(self) -> HostOccupancy:
        """The current sizes. From any thread, because only lengths are read."""
        return HostOccupancy(
            num_pages=self.pages.num_blocks,
            num_cached_pages=self._num_cached_pages,
            num_stored_pages=self._num_stored_pages,
            num_loaded_pages=self._num_loaded_pages,
            num_loaded_tokens=self._num_loaded_tokens,
            num_skipped_stores=self._num_skipped_stores,
            page_bytes=self._config.page_bytes,
        )

    def block_cached(self, block_hash: bytes, block: Block) -> None:
        """Queue a block of table 0 that was just cached on the device; a later plan stores it."""
        self._stores.append((block_hash, block))
        if len(self._stores) > self._config.num_pages:
            self._stores.popleft()
            self._num_skipped_stores += 1

    def checkpoint_cached(self, checkpoint_hash: bytes) -> None:
        """Queue a checkpoint that was just made on the device; a later plan stores it."""
        self._stores.append((checkpoint_hash, None))

    def begin(self, request: Request, num_hit: int) -> int:
        """Begin to load the host's blocks behind the request's hit of `num_hit` tokens, if they are enough tokens.

        Returns the number of tokens to load; the request must then wait until `take_loaded` returns it. 0: nothing is
        loaded.
        """
        if request in self._loads:
            return 0
        places = self._find(self._hashes.full_blocks(request))
        del places[self._num_usable([place.block_hash for place in places]) :]
        num_tokens = len(places) * self._groups.block_size - num_hit
        if num_tokens < self._config.min_load_tokens or (load := self._reserve(request, places)) is None:
            return 0
        self._loads[request] = load
        self._num_loaded_tokens += num_tokens
        return num_tokens

    def held(self, block_hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return how many of a prefix's leading blocks are on the device or in host memory, and up to which of them a
        request can use them."""
        places = self._find(block_hashes)
        return len(places), self._num_usable(block_hashes[: len(places)])

    def touch(self, block_hashes: Iterable[bytes]) -> list[Block]:
        """Reference the pages of those blocks that are in host memory, and return them. `release` undoes it."""
        found = (self.cache.cached_blocks.get(block_hash) for block_hash in block_hashes)
        pages = [page for page in found if page is not None]
        self.pages.touch(pages)
        return pages

    def refresh(self, block_hashes: Sequence[bytes]) -> None:
        """Make the pages of a prefix, and those of a checkpoint at its end, the last ones to be evicted."""
        self.release(self.touch(block_hashes), [])
        checkpoint = self.cache.checkpoints.get(block_hashes[-1]) if block_hashes else None
        if checkpoint is not None:
            for page in chain.from_iterable(checkpoint.window_blocks):
                self.pages.refresh(page)
            if checkpoint.state is not None and self.states is not None:
                self.states.refresh(checkpoint.state)

    def add(self, block_hash: bytes, page: Block) -> None:
        """Cache a page of table 0 that a fetch has filled."""
        if (replaced := self.cache.add(page, block_hash)) is not None:
            self.pages.demote(replaced)

    def adopt(self, adopted: Adopted) -> None:
        """Cache what an earlier engine has left in a range of pages."""
        assert self._adoption is not None, "each range is reported once"
        if self._adoption.take(adopted):
            self._adoption = None

    def release(self, pages: Sequence[Block], states: Sequence[Block]) -> None:
        """Drop a reference to each of a fetch's pages and states."""
        self.pages.free_blocks(pages)
        if self.states is not None:
            self.states.free_blocks(states)

    def take_loaded(self) -> list[Request]:
        """Return the requests whose loads were planned completely, or given up, since the last call."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def end_load(self, request: Request) -> None:
        """Drop the references of a request's load, when the request has started or ended. Its blocks stay cached."""
        load = self._loads.pop(request, None)
        if load is not None:
            self._drop(load)
        if request in self._loaded:
            self._loaded.remove(request)

    def give_up(self, first: Request | None = None) -> bool:
        """Give up the load of the last request, to make room on the device. Returns False if there is none.

        Loads of requests before `first`, which needs the room, are kept.
        """
        request = max(self._loads, key=_order, default=None)
        if request is None or (first is not None and request.order < first.order):
            return False
        load = self._loads.pop(request)
        if load.units:  # otherwise the request is in `_loaded` already
            self._loaded.append(request)
        self._drop(load)
        return True

    def plan(self) -> Copies:
        """Return the copies of this step, loads first. Call it before the step's own blocks are cached, and `end_plan`
        after.

        Pages that a plan stores or loads are referenced until `end_plan`, so that no store overwrites the page of a
        load.
        """
        if not self._stores and not self._loads:
            return NO_COPIES
        copies, budget = Copies(self.serial + 1), self._config.max_step_pages
        for request, load in self._loads.items():
            while load.units and budget > 0:
                budget -= self._plan_load(load.units.popleft(), copies)
                if not load.units:
                    self._loaded.append(request)
        while self.has_stores and budget > 0:
            block_hash, block = self._stores.popleft()
            if block is None:
                budget -= self._plan_checkpoint(block_hash, copies)
            else:
                budget -= self._plan_store(block_hash, block, copies)
        self.serial += bool(copies)
        return copies

    def end_plan(self) -> None:
        """Drop the plan's references. The device's state slots that it stores can be reallocated only from now on."""
        if self._planned_pages:
            self.pages.free_blocks(self._planned_pages)
            self._planned_pages = []
        if self.states is not None and self._device_states is not None:
            self.states.free_blocks(self._planned_states)
            self._device_states.free_blocks(self._stored_states)
            self._planned_states, self._stored_states = [], []

    def give_up_all(self) -> None:
        """Give up all loads and all queued stores, because the device's blocks lose their content."""
        self._stores.clear()
        while self.give_up():
            pass

    def reset(self) -> None:
        """Forget everything, as after a change of weights."""
        self.give_up_all()
        self.cache.reset()
        if self._adoption is not None:
            self._adoption.is_stale = True

    def check_integrity(
        self, fetched: tuple[Sequence[Block], Sequence[Block]] = ((), ())
    ) -> tuple[list[Block], list[Block]]:
        """Raises `AssertionError` unless exactly the pages that unplanned loads will read, those of fetches, and those
        that are still to be adopted are referenced.

        Returns the device's blocks and states that loads reference, once for each load.
        """
        self.pages.check_integrity()
        pages, states = self.pages.blocks, list[Block]()
        if self.states is not None:
            self.states.check_integrity()
            states = self.states.blocks
        self.cache.check_integrity([*pages, *states])
        units = [unit for load in self._loads.values() for unit in load.units]
        sources = [page for unit in units for page, _ in unit.pages] + [*fetched[0], *fetched[1]]
        sources += [unit.state_page for unit in units if unit.state_page is not None]
        sources += [] if self._adoption is None else self._adoption.referenced
        for page in (*pages, *states):
            assert page.ref_count == sources.count(page), f"page {page.block_id} has leaked"
        assert not self._planned_pages
        assert not self._stored_states
        loads = self._loads.values()
        return [block for load in loads for block in load.blocks], [state for load in loads for state in load.states]

    @property
    def _waits_for_adoption(self) -> bool:
        """Whether nothing has room until more is adopted. What is computed in the first moments after a start would
        otherwise not be stored at all, because a block is queued once."""
        if self._adoption is None:
            return False
        return not self.pages.num_free_blocks or (self.states is not None and not self.states.num_free_blocks)

    @property
    def _num_cached_pages(self) -> int:
        return sum(map(len, (self.cache.cached_blocks, *self.cache.cached_window_blocks)))

    def _find(self, block_hashes: Iterable[bytes]) -> list[_Place]:
        """Return the leading blocks that are cached on the device or in host memory."""
        places: list[_Place] = []
        for block_hash in block_hashes:
            block, page = self._device.cached_blocks.get(block_hash), self.cache.cached_blocks.get(block_hash)
            if block is None and page is None:
                break
            places.append(_Place(block_hash, block, page))
        return places

    def _num_usable(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many of these leading blocks, which are cached, a request can use: up to the last checkpoint, if
        the model needs one."""
        if not self._groups.has_checkpoints:
            return len(block_hashes)
        checkpoints = (self._device.checkpoints, self.cache.checkpoints)
        lengths = range(len(block_hashes), 0, -1)
        return next((n for n in lengths if any(block_hashes[n - 1] in known for known in checkpoints)), 0)

    def _reserve(self, request: Request, places: Sequence[_Place]) -> _Load | None:
        """Allocate the blocks that a load writes, and reference the pages and the hit's blocks. None if there is no
        room.

        There must be room for the whole start of the request, so that a load never takes blocks that the start then
        lacks.
        """
        tables = self._window_places(places[-1].block_hash) if self._groups.has_checkpoints else []
        needed = [*places, *chain.from_iterable(tables)]
        held = [place.block for place in needed if place.block is not None]
        sources = [place.page for place in needed if place.block is None and place.page is not None]
        num_free = self._device_blocks.num_free_blocks - self._device_blocks.num_free_of(held)
        if num_free < max(self._groups.blocks_of(request.num_slots_to_start) - len(held), len(sources)):
            return None
        if self._device_states is not None and self._device_states.num_free_blocks < _NUM_FREE_STATES:
            return None
        self._device_blocks.touch(held)
        self.pages.touch(sources)
        targets = self._device_blocks.get_new_blocks(len(sources))
        load, remaining = _Load([*held, *targets]), iter(targets)
        for place in places:
            if place.block is None and place.page is not None:
                load.units.append(_Unit(place.block_hash, [(place.page, next(remaining))]))
        if tables or self._device_states is not None:
            self._reserve_checkpoint(places[-1].block_hash, tables, remaining, load)
        return load

    def _window_places(self, checkpoint_hash: bytes) -> list[list[_Place]]:
        """Return the places of a checkpoint's blocks, by table with a window."""
        on_device = self._device.checkpoints.get(checkpoint_hash)
        if on_device is not None:
            return [[_Place(block.block_hash, block, None) for block in blocks] for blocks in on_device.window_blocks]
        return [
            [_Place(page.block_hash, cached.get(page.block_hash), page) for page in pages]
            for cached, pages in zip(
                self._device.cached_window_blocks, self.cache.checkpoints[checkpoint_hash].window_blocks, strict=True
            )
        ]

    def _reserve_checkpoint(
        self, checkpoint_hash: bytes, tables: Sequence[Sequence[_Place]], targets: Iterator[Block], load: _Load
    ) -> None:
        """Add the checkpoint to the load: its states, and those of its blocks that are not on the device."""
        on_device = self._device.checkpoints.get(checkpoint_hash)
        if on_device is not None:
            if on_device.state is not None and self._device_states is not None:
                self._device_states.touch([on_device.state])
                load.states.append(on_device.state)
            return
        unit = _Unit(checkpoint_hash, is_checkpoint=True)
        for places in tables:
            blocks = [place.block or next(targets) for place in places]
            unit.pages += [
                (place.page, block)
                for place, block in zip(places, blocks, strict=True)
                if place.block is None and place.page is not None
            ]
            unit.window_blocks.append([(each.block_hash, block) for each, block in zip(places, blocks, strict=True)])
        source = self.cache.checkpoints[checkpoint_hash].state
        if source is not None and self.states is not None and self._device_states is not None:
            self.states.touch([source])
            (unit.state,) = self._device_states.get_new_blocks(1)
            unit.state_page = source
            load.states.append(unit.state)
        load.units.append(unit)

    def _drop(self, load: _Load) -> None:
        for unit in load.units:
            self.pages.free_blocks([page for page, _ in unit.pages])
            if unit.state_page is not None and self.states is not None:
                self.states.free_blocks([unit.state_page])
        self._device_blocks.free_blocks(load.blocks)
        if self._device_states is not None:
            self._device_states.free_blocks(load.states)

    def _plan_load(self, unit: _Unit, copies: Copies) -> int:
        """Plan the copies of a unit and cache it on the device, where the next steps find it. Returns its size in
        pages."""
        copies.loads += [(page.block_id, block.block_id) for page, block in unit.pages]
        self._planned_pages += [page for page, _ in unit.pages]
        self._num_loaded_pages += len(unit.pages)
        if not unit.is_checkpoint:
            ((_, block),) = unit.pages
            if (replaced := self._device.add(block, unit.block_hash)) is not None:
                self._device_blocks.demote(replaced)
            return 1
        if unit.state is not None and unit.state_page is not None:
            copies.state_loads.append((unit.state_page.block_id, unit.state.block_id))
            self._planned_states.append(unit.state_page)
        if unit.block_hash not in self._device.checkpoints:
            self._device.add_checkpoint(unit.block_hash, unit.window_blocks, unit.state)
        return len(unit.pages) + (unit.state is not None) * self._config.state_pages

    def _plan_store(self, block_hash: bytes, block: Block, copies: Copies) -> int:
        """Plan to store a block, unless it was evicted, or host memory has it or has no room. Returns the number of
        pages."""
        if self._device.cached_blocks.get(block_hash) is not block or block_hash in self.cache.cached_blocks:
            return 0
        if not self.pages.num_free_blocks:
            self._num_skipped_stores += 1
            return 0
        (page,) = self.pages.get_new_blocks(1)
        self.cache.add(page, block_hash)
        self._planned_pages.append(page)
        copies.stores.append((block.block_id, page.block_id))
        copies.stored_blocks.append((page.block_id, block_hash))
        self._num_stored_pages += 1
        return 1

    def _plan_checkpoint(self, checkpoint_hash: bytes, copies: Copies) -> int:
        """Plan to store a checkpoint as a whole, or not at all. Returns its size in pages.

        Pages that are in host memory already are referenced first: allocating others may evict the checkpoint that they
        belong to.
        """
        source = self._device.checkpoints.get(checkpoint_hash)
        if source is None or checkpoint_hash in self.cache.checkpoints:
            return 0
        known = [
            [cached.get(block.block_hash) for block in blocks]
            for cached, blocks in zip(self.cache.cached_window_blocks, source.window_blocks, strict=True)
        ]
        shared = [page for pages in known for page in pages if page is not None]
        num_new = sum(map(len, known)) - len(shared)
        self.pages.touch(shared)
        has_states = self.states is None or self.states.num_free_blocks > 0
        if self.pages.num_free_blocks < num_new or not has_states:
            self.pages.free_blocks(shared)
            self._num_skipped_stores += num_new
            return 0
        new = self.pages.get_new_blocks(num_new)
        self._planned_pages += [*shared, *new]
        remaining, stored = iter(new), list[list[tuple[bytes, Block]]]()
        for blocks, pages in zip(source.window_blocks, known, strict=True):
            stored.append([])
            for block, page in zip(blocks, pages, strict=True):
                if page is None:
                    page = next(remaining)
                    copies.stores.append((block.block_id, page.block_id))
                stored[-1].append((block.block_hash, page))
        state: Block | None = None
        if source.state is not None and self.states is not None and self._device_states is not None:
            (state,) = self.states.get_new_blocks(1)
            copies.state_stores.append((source.state.block_id, state.block_id))
            self._planned_states.append(state)
            self._device_states.touch([source.state])
            self._stored_states.append(source.state)
        self.cache.add_checkpoint(checkpoint_hash, stored, state)
        tails = [[(page.block_id, block_hash) for block_hash, page in pages] for pages in stored]
        copies.stored_checkpoints.append(
            StoredCheckpoint(checkpoint_hash, tails, NO_STATE if state is None else state.block_id)
        )
        self._num_stored_pages += num_new
        return num_new + (state is not None) * self._config.state_pages


def _order(request: Request) -> tuple[int, ...]:
    return request.order
