"""Engines of the simulation of sessions: a cache of blocks, and prompts that are computed one after the other."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from proa.contract import SchedulerStats
from proa_engine.server.claims import Claims
from proa_gateway.engines.engine_loras import EngineLoras

BLOCK_SIZE = 64  # with 16, as engines have it, a run takes four times as long
DECODE_SPEED = 80.0  # tokens a second of one stream
LOAD_SPEED = 10.0  # of blocks from host memory, in terms of computing them


class Cache:
    """Blocks by name. Free ones are evicted from the front of `free`, then from that of `retained`, which are those
    that gateways retain, `owners`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[bytes, int] = {}
        self.free: OrderedDict[bytes, None] = OrderedDict()
        self.retained: OrderedDict[bytes, None] = OrderedDict()
        self.owners: dict[bytes, int] = {}  # a bit of each gateway
        self.num_owned = Counter[int]()  # by gateway

    def num_hits(self, path: Sequence[bytes]) -> int:
        for index, block in enumerate(path):
            if block not in self.used and block not in self.free and block not in self.retained:
                return index
        return len(path)

    def take(self, path: Sequence[bytes]) -> bool:
        """Use the blocks of a path; those that are missing take the place of free ones. False if too few are free."""
        missing = sum(block not in self.used for block in path)
        if len(self.used) + missing > self.capacity:
            return False
        for block in path:
            self.used[block] = self.used.get(block, 0) + 1
            self.free.pop(block, None)
            self.retained.pop(block, None)
        while len(self.used) + len(self.free) + len(self.retained) > self.capacity:
            block, _ = (self.free or self.retained).popitem(last=False)
            self._count(self.owners.pop(block, 0), -1)
        return True

    def give(self, path: Sequence[bytes], owner: int | None) -> None:
        """Stop using a path. `owner`: the gateway that retains it; None: none does."""
        if owner is not None:
            for block in path:
                before = self.owners.get(block, 0)
                self.owners[block] = before | 1 << owner
                self.num_owned[owner] += not before & 1 << owner
        for block in reversed(path):
            self.used[block] -= 1
            if not self.used[block]:
                del self.used[block]
                (self.retained if block in self.owners else self.free)[block] = None

    def _count(self, owners: int, change: int) -> None:
        while owners:
            self.num_owned[owners.bit_length() - 1] += change
            owners &= ~(1 << (owners.bit_length() - 1))

    def release(self, blocks: Sequence[bytes], owner: int) -> None:
        for block in blocks:
            owners = self.owners.pop(block, 0)
            self.num_owned[owner] -= bool(owners & 1 << owner)
            if left := owners & ~(1 << owner):
                self.owners[block] = left
            elif owners and block in self.retained:
                del self.retained[block]
                self.free[block] = None
                self.free.move_to_end(block, last=False)


class HostCache:
    """Copies of blocks in host memory, of which the least recently used ones are evicted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_hits(self, path: Sequence[bytes]) -> int:
        return next((index for index, block in enumerate(path) if block not in self._blocks), len(path))

    def store(self, path: Sequence[bytes]) -> None:
        for block in reversed(path):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)


@dataclass(slots=True, eq=False)
class Prompt:
    """`on_first` is called when it is computed, with the number of its blocks that were cached; `on_end` when its
    output is complete. Then its blocks are free, retained by the gateway that `on_end` returns, if any."""

    path: list[bytes]
    output_tokens: int
    on_first: Callable[[int], None]
    on_end: Callable[[], int | None]


class SimulatedEngine:
    """Computes prompts one after the other at a fixed rate, decodes each stream at a fixed speed, and evicts blocks as
    `BlockPool` does."""

    def __init__(
        self,
        address: str,
        capacity: int,
        rate: float,
        now: Callable[[], float],
        at: Callable[[float, Callable[[], None]], None],
        *,
        host: int = 0,
    ) -> None:
        """`capacity` and `host` in tokens, `rate` in tokens a second. `at`: calls a function at a time."""
        self.address = address
        self.cache = Cache(capacity // BLOCK_SIZE)
        self.host = HostCache(host // BLOCK_SIZE)
        self.load_stats = SchedulerStats(prefill_tokens_per_second=rate)
        self.usable = True
        self.load = 0
        self.claims = Claims()
        self.kv_cache_usage = 0.0
        self.loras = EngineLoras(address, lambda lora, model: None)
        self._rate = rate / BLOCK_SIZE
        self._queue: deque[Prompt] = deque()
        self._is_computing = False
        self._now, self._at = now, at

    def submit(self, prompt: Prompt) -> None:
        self.load += 1
        self._queue.append(prompt)
        self._compute()

    def stats_for(self, gateway: int) -> SchedulerStats:
        """What the gateway is told."""
        stats = replace(self.load_stats, num_retained_blocks=len(self.cache.owners))
        self.claims.fill(stats, gateway, lambda stream: self.cache.num_owned.get(stream, 0))
        return stats

    def _compute(self) -> None:
        if self._queue and not self._is_computing:
            prompt = self._queue[0]
            hits = self.cache.num_hits(prompt.path)
            loads = self.host.num_hits(prompt.path[hits:])
            if self.cache.take(prompt.path):
                self._queue.popleft()
                self._is_computing = True
                seconds = (len(prompt.path) - hits - loads + 1 + loads / LOAD_SPEED) / self._rate
                self._at(self._now() + seconds, lambda: self._computed(prompt, hits + loads))
        self.load_stats.num_waiting_reqs = len(self._queue)

    def _computed(self, prompt: Prompt, hits: int) -> None:
        self._is_computing = False
        prompt.on_first(hits)
        self._at(self._now() + prompt.output_tokens / DECODE_SPEED, lambda: self._decoded(prompt))
        self._compute()

    def _decoded(self, prompt: Prompt) -> None:
        self.load -= 1
        self.host.store(prompt.path)
        self.cache.give(prompt.path, prompt.on_end())
        self._compute()
