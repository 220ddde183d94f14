"""Loads: what requests that have not started load from host memory to the device."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.pools import PlannedReferences, Pools
from proa_engine.core.kv.prefix_cache import BlockHashes
from proa_engine.core.request import Request
from proa_engine.core.types import Block, Copies

_NUM_FREE_STATES = 2  # device slots that a load needs: for the state that it writes, and the request's own


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
    state_pages: Sequence[Block] = ()  # of the host
    states: Sequence[Block] = ()
    is_checkpoint: bool = False


@dataclass(slots=True, eq=False)
class _Load:
    """The load of a request's blocks to the device. Its references are kept until the request starts."""

    blocks: list[Block]
    states: list[Block] = field(default_factory=list)
    units: deque[_Unit] = field(default_factory=deque)  # not planned yet


class Loads:
    """The loads of an engine, by request. A request waits until all its copies are planned; then it finds the blocks as
    an ordinary hit. Fewer than `min_tokens` tokens are not loaded but computed."""

    def __init__(
        self,
        groups: CacheGroups,
        hashes: BlockHashes,
        device: Pools,
        host: Pools,
        planned: PlannedReferences,
        *,
        min_tokens: int,
        state_pages: int,
    ) -> None:
        self.num_tokens = self.num_pages = 0  # since the start
        self.min_tokens = min_tokens
        self.by_request: dict[Request, _Load] = {}  # of requests that have not started
        self._groups = groups
        self._hashes = hashes
        self._device = device
        self._host = host
        self._planned = planned
        self._state_pages = state_pages
        self._ended: list[Request] = []

    def held(self, block_hashes: Iterable[bytes]) -> tuple[int, int]:
        """Return how many of a prefix's leading blocks are on the device or in host memory, and up to which of them a
        request can use them."""
        places = self._find(block_hashes)
        return len(places), self._num_usable(places)

    def begin(self, request: Request, num_hit: int) -> int:
        """Begin to load the host's blocks behind the request's hit of `num_hit` tokens, if they are enough tokens.

        Returns the number of tokens to load; the request must then wait until `take_ended` returns it. 0: nothing is
        loaded.
        """
        if request in self.by_request or not request.reads_prefix_cache:
            return 0
        places = self._find(self._hashes.full_blocks(request))
        del places[self._num_usable(places) :]
        num_tokens = len(places) * self._groups.block_size - num_hit
        if num_tokens < self.min_tokens or not (load := self._reserve(request, places)):
            return 0
        self.by_request[request] = load
        self.num_tokens += num_tokens
        return num_tokens

    def take_ended(self) -> Sequence[Request]:
        """Return the requests whose loads were planned completely, or given up, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def end(self, request: Request) -> None:
        """Drop the references of a request's load, when the request has started or ended. Its blocks stay cached."""
        load = self.by_request.pop(request, None)
        if load is not None:
            self._drop(load)
        if request in self._ended:
            self._ended.remove(request)

    def give_up(self, first: Request | None = None) -> bool:
        """Give up the load of the last request, to make room on the device. Returns False if there is none.

        Loads of requests before `first`, which needs the room, are kept.
        """
        request = max(self.by_request, key=_order, default=None)
        if request is None or (first is not None and request.order < first.order):
            return False
        load = self.by_request.pop(request)
        if load.units:  # otherwise the request is in `_ended` already
            self._ended.append(request)
        self._drop(load)
        return True

    def plan(self, copies: Copies, budget: int) -> int:
        """Plan the copies of the loads, at most `budget` pages and one more unit. Returns what is left of it."""
        for request, load in self.by_request.items():
            while load.units and budget > 0:
                budget -= self._plan_unit(load.units.popleft(), copies)
                if not load.units:
                    self._ended.append(request)
        return budget

    @property
    def host_references(self) -> tuple[list[Block], list[Block]]:
        """The pages and states of the host that copies which are not planned will read, once for each."""
        units = [unit for load in self.by_request.values() for unit in load.units]
        pages = [page for unit in units for page, _ in unit.pages]
        return pages, [state for unit in units for state in unit.state_pages]

    @property
    def device_references(self) -> tuple[list[Block], list[Block]]:
        """The blocks and states of the device that loads reference, once for each."""
        loads = self.by_request.values()
        return [block for load in loads for block in load.blocks], [state for load in loads for state in load.states]

    def _find(self, block_hashes: Iterable[bytes]) -> list[_Place]:
        """Return the leading blocks that are cached on the device or in host memory."""
        places: list[_Place] = []
        on_device, in_host = self._device.cache.cached_blocks, self._host.cache.cached_blocks
        for block_hash in block_hashes:
            block, page = on_device.get(block_hash), in_host.get(block_hash)
            if not (block or page):
                break
            places.append(_Place(block_hash, block, page))
        return places

    def _num_usable(self, places: Sequence[_Place]) -> int:
        """Return how many of these leading blocks a request can use: up to the last checkpoint, if the model needs
        one."""
        if not self._groups.has_checkpoints:
            return len(places)
        checkpoints = (self._device.cache.checkpoints, self._host.cache.checkpoints)
        lengths = range(len(places), 0, -1)
        return next((n for n in lengths if any(places[n - 1].block_hash in known for known in checkpoints)), 0)

    def _reserve(self, request: Request, places: Sequence[_Place]) -> _Load | None:
        """Allocate the blocks that a load writes, and reference the pages and the hit's blocks. None if there is no
        room.

        There must be room for the whole start of the request, so that a load never takes blocks that the start then
        lacks.
        """
        device, has_checkpoints = self._device, self._groups.has_checkpoints
        tables = self._window_places(places[-1].block_hash) if has_checkpoints else []
        needed = [*places, *chain.from_iterable(tables)]
        held = [place.block for place in needed if place.block]
        sources = [place.page for place in needed if place.page and not place.block]
        num_free = device.blocks.num_free_blocks - device.blocks.num_free_of(held)
        if num_free < max(self._groups.blocks_of(request.num_slots_to_start) - len(held), len(sources)):
            return None
        if device.has_states and device.states.num_free_blocks < _NUM_FREE_STATES:
            return None
        device.blocks.touch(held)
        self._host.blocks.touch(sources)
        targets = device.blocks.get_new_blocks(len(sources))
        load, remaining = _Load([*held, *targets]), iter(targets)
        for place in places:
            if place.page and not place.block:
                load.units.append(_Unit(place.block_hash, [(place.page, next(remaining))]))
        if has_checkpoints:
            self._reserve_checkpoint(places[-1].block_hash, tables, remaining, load)
        return load

    def _window_places(self, checkpoint_hash: bytes) -> list[list[_Place]]:
        """Return the places of a checkpoint's blocks, by table with a window."""
        on_device = self._device.cache.checkpoints.get(checkpoint_hash)
        if on_device is not None:
            return [[_Place(block.block_hash, block, None) for block in blocks] for blocks in on_device.window_blocks]
        in_host, tables = self._host.cache.checkpoints[checkpoint_hash], self._device.cache.cached_window_blocks
        return [
            [_Place(page.block_hash, cached.get(page.block_hash), page) for page in pages]
            for cached, pages in zip(tables, in_host.window_blocks, strict=True)
        ]

    def _reserve_checkpoint(
        self, checkpoint_hash: bytes, tables: Sequence[Sequence[_Place]], targets: Iterator[Block], load: _Load
    ) -> None:
        """Add the checkpoint to the load: its states, and those of its blocks that are not on the device."""
        on_device = self._device.cache.checkpoints.get(checkpoint_hash)
        if on_device is not None:
            self._device.states.touch(on_device.states)
            load.states += on_device.states
            return
        unit = _Unit(checkpoint_hash, is_checkpoint=True)
        for places in tables:
            blocks = [place.block or next(targets) for place in places]
            unit.pages += [
                (place.page, block)
                for place, block in zip(places, blocks, strict=True)
                if place.page and not place.block
            ]
            unit.window_blocks.append([(each.block_hash, block) for each, block in zip(places, blocks, strict=True)])
        unit.state_pages = self._host.cache.checkpoints[checkpoint_hash].states
        self._host.states.touch(unit.state_pages)
        unit.states = self._device.states.get_new_blocks(len(unit.state_pages))
        load.states += unit.states
        load.units.append(unit)

    def _drop(self, load: _Load) -> None:
        for unit in load.units:
            self._host.free([page for page, _ in unit.pages], unit.state_pages)
        self._device.free(load.blocks, load.states)

    def _plan_unit(self, unit: _Unit, copies: Copies) -> int:
        """Plan the copies of a unit and cache it on the device, where the next steps find it. Returns its size in
        pages."""
        copies.loads += [(page.block_id, block.block_id) for page, block in unit.pages]
        self._planned.pages += [page for page, _ in unit.pages]
        self.num_pages += len(unit.pages)
        if not unit.is_checkpoint:
            ((_, block),) = unit.pages
            self._device.cache_block(block, unit.block_hash)
            return 1
        states = zip(unit.state_pages, unit.states, strict=True)
        copies.state_loads += [(page.block_id, state.block_id) for page, state in states]
        self._planned.states += unit.state_pages
        if unit.block_hash not in self._device.cache.checkpoints:
            self._device.cache.add_checkpoint(unit.block_hash, unit.window_blocks, unit.states)
        return len(unit.pages) + len(unit.states) * self._state_pages


def _order(request: Request) -> tuple[int, ...]:
    return request.order
