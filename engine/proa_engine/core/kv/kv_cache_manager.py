"""KVCacheManager: allocates KV cache blocks and state slots to requests and finds cached prefixes for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proa.contract import KvSource, SchedulerStats
from proa_engine.core.kv.block_pool import BlockPool
from proa_engine.core.kv.block_tables import BlockTables
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.checkpoints import CheckpointPositions, Checkpoints
from proa_engine.core.kv.disk_tier import DiskTier
from proa_engine.core.kv.fetches import Fetches
from proa_engine.core.kv.host_tier import HostTier, HostTierConfig
from proa_engine.core.kv.mover import Adopted, DiskChanges, Fetched, Mover
from proa_engine.core.kv.prefix_cache import BlockHashes, BlockHashFunction, Checkpoint, PrefixCache
from proa_engine.core.kv.state_slots import StateSlots
from proa_engine.core.request import CACHES_NOTHING, Request
from proa_engine.core.types import NO_COPIES, NO_STATES, Block, CacheOccupancy, Copies, DiskOccupancy, StateSteps


@dataclass(frozen=True, slots=True)
class Hit:
    """A request's cached prefix of `num_tokens` tokens. It holds no references to the blocks."""

    num_tokens: int
    num_known_tokens: int  # tokens whose blocks of table 0 are cached; at least `num_tokens`
    blocks: Sequence[Block]  # of table 0, `num_tokens` tokens
    checkpoint: Checkpoint | None  # at the prefix's end, for models that need one


MISS = Hit(0, 0, (), None)


class KVCacheManager:
    """Block tables of requests over a `BlockPool`, their states in `StateSlots`, and their prefix cache.

    `hash_block` None disables prefix caching. `root_hash` is the parent hash of every sequence's first block.
    `checkpoint_positions` is needed for caching with windows or states. `host` None: there is no host tier; `mover`
    None: nothing is fetched. `has_disk`: the mover has a disk. `has_sources`: it fetches from the engines that requests
    name.
    """

    def __init__(
        self,
        groups: CacheGroups,
        *,
        hash_block: BlockHashFunction | None = None,
        root_hash: bytes = b"",
        checkpoint_positions: CheckpointPositions | None = None,
        block_order: Sequence[int] | None = None,
        host: HostTierConfig | None = None,
        mover: Mover | None = None,
        has_disk: bool = False,
        has_sources: bool = True,
    ) -> None:
        self.groups = groups
        self.num_queried_tokens = 0  # tokens of requests when they were first scheduled, since start
        self.num_hit_tokens = 0
        self._block_size = groups.block_size
        self._has_sources = has_sources
        self._cache = PrefixCache(len(groups.windows))
        self._pool = BlockPool(groups.num_blocks, self._cache.evict, order=block_order)
        self._tables = BlockTables(groups, self._pool)
        self._states = StateSlots(groups.num_state_slots, self._cache.evict) if groups.num_state_slots else None
        self.kv_events = self._cache.kv_events
        self._hashes = None if hash_block is None else BlockHashes(hash_block, root_hash, groups.block_size)
        self._host: HostTier | None = None
        self._fetches: Fetches | None = None
        self._disk: DiskTier | None = None
        if host is not None and self._hashes is not None:
            states = None if self._states is None else self._states.pool
            self._host = HostTier(host, groups, self._hashes, self._cache, self._pool, states)
            self.kv_events.host = self._host.cache.kv_events
            if mover is not None:
                if has_disk:
                    self._disk = DiskTier(self._host, mover, needs_checkpoint=groups.has_checkpoints)
                self._fetches = Fetches(self._host, mover, groups, self._hashes, self._disk)
        self._checkpoints: Checkpoints | None = None
        if groups.has_checkpoints and hash_block is not None:
            assert checkpoint_positions is not None
            self._checkpoints = Checkpoints(groups, checkpoint_positions, self._cache, self._pool, self._tables)

    def fill_stats(self, stats: SchedulerStats) -> None:
        """Set the fields of the statistics that describe the cache and its tiers."""
        usage, states = self._pool.usage, self._states
        stats.kv_cache_usage = usage if states is None else max(usage, states.pool.usage)
        stats.prefix_cache_queries, stats.prefix_cache_hits = self.num_queried_tokens, self.num_hit_tokens
        if self._host is not None:
            stats.host_cache_usage = self._host.usage
            stats.load_bytes_per_second = self._host.load_bytes_per_second
        if self._fetches is not None:
            stats.num_fetching_reqs = self._fetches.num_requests

    @property
    def occupancy(self) -> CacheOccupancy:
        """What the cache holds now. From any thread, because only lengths are read."""
        maps = (self._cache.cached_blocks, *self._cache.cached_window_blocks)
        cached_blocks, num_checkpoints = tuple(map(len, maps)), len(self._cache.checkpoints)
        host = None if self._host is None else self._host.occupancy
        fetches = disk = None
        if self._fetches is not None:
            fetches = self._fetches.counts
            if self._disk is not None:
                disk = DiskOccupancy(len(self._disk.blocks), self._disk.counts, self._fetches.disk_counts)
        if self._states is None:
            return CacheOccupancy(cached_blocks, num_checkpoints, host=host, fetches=fetches, disk=disk)
        slots, num_cached = self._states.pool, len(self._cache.cached_states)
        num_used = slots.num_blocks - slots.num_free_blocks
        num_free = max(slots.num_free_blocks - num_cached, 0)
        return CacheOccupancy(cached_blocks, num_checkpoints, num_used, num_cached, num_free, host, fetches, disk)

    def get_computed_blocks(self, request: Request) -> Hit:
        """Return the request's longest cached prefix that it can continue.

        At least the last token is left to compute. The hit is empty for a request that needs every token to be
        computed.
        """
        if self._hashes is None or not request.reads_prefix_cache:
            return MISS
        blocks: list[Block] = []
        for index in range((request.num_tokens - 1) // self._block_size):
            block = self._cache.cached_blocks.get(self._hashes.of(request, index))
            if block is None:
                break
            blocks.append(block)
        num_known = len(blocks) * self._block_size
        if self._checkpoints is None:
            return Hit(num_known, num_known, blocks, None)
        for length in range(len(blocks), 0, -1):
            checkpoint = self._cache.checkpoints.get(request.block_hashes[length - 1])
            if checkpoint is not None:
                return Hit(length * self._block_size, num_known, blocks[:length], checkpoint)
        return Hit(0, num_known, (), None)

    def allocate_slots(self, request: Request, num_tokens: int, hit: Hit | None = None) -> list[list[int]] | None:
        """Extend the request's blocks so that `num_tokens` tokens in total can be computed.

        `hit` is set for a request that holds no blocks yet. Returns the ids of the added blocks by table, those of the
        hit first, and -1 where a window needs no block. If there is not enough room, returns None and allocates
        nothing.
        """
        if hit is None:
            return self._tables.extend(request, num_tokens)
        window_blocks, snapshot = (
            ((), None) if hit.checkpoint is None else (hit.checkpoint.window_blocks, hit.checkpoint.state)
        )
        if self._states is not None and not self._states.can_allocate(snapshot):
            return None
        block_ids = self._tables.allocate(request, num_tokens, hit.blocks, window_blocks)
        if block_ids is None:
            return None
        if self._states is not None:
            self._states.allocate(request, snapshot)
        request.num_cached_blocks = len(hit.blocks) if self._hashes is not None else CACHES_NOTHING
        if self._checkpoints is not None:
            self._checkpoints.plan(request, hit.num_tokens, hit.num_known_tokens)
        return block_ids

    def cache_blocks(self, candidates: Iterable[tuple[Request, int]]) -> Mapping[str, StateSteps]:
        """Cache the blocks that a step fills, and make its checkpoints, if the host knows their tokens.

        `candidates` are the step's requests that may fill a block, each with the first token that the step computes.
        Call it when the whole step is planned: a request that finds a block must be computed in a later step than the
        block. Returns, by request id, the states of the rows that read or write another state slot than their own.
        """
        steps: dict[str, StateSteps] = {}
        for request, start in candidates:
            num_before = request.num_cached_blocks
            self._cache_full_blocks(request)
            due = self._checkpoints.due(request, start, num_before) if self._checkpoints is not None else []
            if self._states is not None:
                row = self._states.plan(request, start, due, self._add_checkpoint)
                if row is not None:
                    steps[request.request_id] = row
            else:
                for position in due:
                    self._add_checkpoint(request, position)
        if self._host is not None:
            self._host.end_plan()
        if self._states is None:
            return NO_STATES
        self._states.free_read()
        return steps

    def begin_fetch(self, request: Request, source: KvSource | None, now: float, prefill_rate: float) -> bool:
        """Begin to fetch the request's blocks from disk or from another engine. Returns whether the request must wait
        for them. `prefill_rate`: see `Fetches.begin`."""
        if self._fetches is None or not request.reads_prefix_cache:
            return False
        return self._fetches.begin(request, source if self._has_sources else None, now, prefill_rate)

    def is_fetching(self, request: Request) -> bool:
        """Whether the request waits for blocks from disk or from another engine."""
        return self._fetches is not None and self._fetches.is_fetching(request)

    def take_fetched(self, fetched: Fetched, now: float) -> Sequence[Request]:
        """Cache what a fetch brought. Returns the requests that waited for it, unless more is to come."""
        assert self._fetches is not None, "only a fetch brings blocks"
        return self._fetches.take(fetched, now) if fetched.is_done else ()

    def take_disk_changes(self, changes: DiskChanges) -> None:
        """Record what has come to the disk and left it."""
        assert self._disk is not None
        self._disk.take(changes)

    def take_adopted(self, adopted: Adopted) -> None:
        """Cache what an earlier engine has left in host memory."""
        assert self._host is not None, "only host memory outlives an engine"
        self._host.adopt(adopted)

    def end_fetch(self, request: Request) -> None:
        """Stop waiting for the request's blocks from disk or from another engine, when it has ended."""
        if self._fetches is not None:
            self._fetches.end(request)

    @property
    def has_copies(self) -> bool:
        """Whether blocks are queued to be stored in host memory."""
        return self._host is not None and self._host.has_stores

    def is_cached(self, request: Request, num_tokens: int) -> bool:
        """Whether another request can continue the request's first `num_tokens` tokens, all of full blocks before its
        last token: their blocks are on the device or in host memory."""
        if self._hashes is None or self._host is None:
            return self.get_computed_blocks(request).num_tokens >= num_tokens
        _, num_usable = self._host.held(list(self._hashes.full_blocks(request)))
        return num_usable * self._block_size >= num_tokens

    def store(self, request: Request) -> None:
        """Queue the request's cached blocks, and the checkpoint at their end, to be stored in host memory. Those that
        are there become the last ones to be evicted. Other blocks are queued when they are computed."""
        if self._hashes is None or self._host is None:
            return
        block_hashes = list(self._hashes.full_blocks(request))
        self._host.refresh(block_hashes)
        for block_hash in block_hashes:
            block = self._cache.cached_blocks.get(block_hash)
            if block is not None and block_hash not in self._host.cache.cached_blocks:
                self._host.block_cached(block_hash, block)
        if block_hashes and block_hashes[-1] in self._cache.checkpoints:
            self._host.checkpoint_cached(block_hashes[-1])

    def begin_load(self, request: Request) -> int:
        """Begin to load the blocks behind the request's hit from host memory. Returns the number of tokens that the
        request must wait for; 0 if nothing is loaded."""
        if self._host is None or not request.reads_prefix_cache:
            return 0
        num_hit = self.get_computed_blocks(request).num_tokens
        num_tokens = self._host.begin(request, num_hit)
        if num_tokens and self._disk is not None:
            self._disk.keep(request, request.block_hashes[: (num_hit + num_tokens) // self._block_size])
        return num_tokens

    def take_loaded(self) -> Sequence[Request]:
        """Return the requests whose loads have ended since the last call."""
        return () if self._host is None else self._host.take_loaded()

    def end_load(self, request: Request) -> None:
        """Drop the references of a request's load, when the request has started or ended."""
        if self._host is not None:
            self._host.end_load(request)

    def give_up_load(self, first: Request | None = None) -> bool:
        """Give up the load of the last request that has not started, unless it is before `first`. Returns False if
        there is none."""
        return self._host is not None and self._host.give_up(first)

    def plan_copies(self) -> Copies:
        """Return the step's copies, when all its blocks are allocated. Call it before `cache_blocks`, which ends the
        plan."""
        return NO_COPIES if self._host is None else self._host.plan()

    def free(self, request: Request) -> None:
        """Free the request's blocks and slot. Cached blocks stay in the prefix cache until they are allocated again."""
        if self._checkpoints is not None:
            self._cache_full_blocks(request)
            position = self._checkpoints.last_position(request)
            if position:
                self._add_checkpoint(request, position, request.state)
        self._tables.free(request)
        if self._states is not None:
            self._states.free(request)
        request.num_cached_blocks = 0
        request.checkpoints = ()

    def reset_prefix_cache(
        self, running: Iterable[Request] = (), *, since: float = 0.0, keep_host: bool = False
    ) -> None:
        """Empty the prefix cache, as after a change of weights at `since`, in Unix seconds. `keep_host`: keep the part
        in host memory.

        The `running` requests keep their blocks and add none to the cache, because their KV is of the old weights.
        """
        self._cache.reset()
        if self._host is not None and not keep_host:
            self._host.reset()
            if self._fetches is not None:
                self._fetches.reset(since)
        for request in running:
            request.num_cached_blocks = CACHES_NOTHING

    def record_lookup(self, num_tokens: int, num_hits: int) -> None:
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hits

    def check_integrity(self, requests: Sequence[Request], pending: Sequence[Request] = ()) -> None:
        """Raises `AssertionError` unless exactly the blocks of `requests`, all running ones, are in use, and only
        requests of `pending` wait for a fetch."""
        self._pool.check_integrity()
        fetched = ([], []) if self._fetches is None else self._fetches.check_integrity(pending)
        held_blocks, held_states = ([], []) if self._host is None else self._host.check_integrity(fetched)
        self._tables.check_integrity(requests, held_blocks)
        blocks = self._pool.blocks
        if self._states is not None:
            self._states.check_integrity(requests, held_states)
            blocks = [*blocks, *self._states.pool.blocks]
            assert all(checkpoint.state for checkpoint in self._cache.checkpoints.values())
        self._cache.check_integrity(blocks)

    def _cache_full_blocks(self, request: Request) -> None:
        """Cache the full blocks of table 0 whose tokens are scheduled and known to the host."""
        num_full = min(request.num_computed_tokens, request.num_tokens) // self._block_size
        if num_full <= request.num_cached_blocks or self._hashes is None:
            return
        table = request.tables[0]
        for index in range(request.num_cached_blocks, num_full):
            block = table[index]
            assert block is not None, "table 0 has all blocks"
            block_hash = self._hashes.of(request, index)
            replaced = self._cache.add(block, block_hash)
            if replaced is not None:
                self._pool.demote(replaced)
            if self._host is not None and block.cached_in is not None:
                self._host.block_cached(block_hash, block)
        request.num_cached_blocks = num_full

    def _add_checkpoint(self, request: Request, position: int, state: Block | None = None) -> None:
        assert self._checkpoints is not None
        self._checkpoints.add(request, position, state)
        if self._host is not None:
            self._host.checkpoint_cached(request.block_hashes[position // self._block_size - 1])
