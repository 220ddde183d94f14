"""KVCacheManager: allocates KV cache blocks and state slots to requests and finds cached prefixes for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from proa.contract import SchedulerStats
from proa_engine.core.kv.block_tables import BlockTables
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.checkpoints import CheckpointPositions, Checkpoints, nowhere
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv.mover import Mover
from proa_engine.core.kv.pools import Pools
from proa_engine.core.kv.prefix_cache import NO_CHECKPOINT, BlockHashes, BlockHashFunction, Checkpoint
from proa_engine.core.kv.retention import Retention
from proa_engine.core.kv.state_slots import NoStateSlots, StateSlots
from proa_engine.core.kv.tiers import NO_TIERS, Tiers
from proa_engine.core.request import CACHES_NOTHING, Request
from proa_engine.core.types import Block, CacheOccupancy, StateSteps


@dataclass(frozen=True, slots=True)
class Hit:
    """A request's cached prefix of `num_tokens` tokens. It holds no references to the blocks.

    Of a request with six blocks, for a model that can continue only at a checkpoint, and without windows or states:

                          0     1     2     3     4     5
        in table 0        yes   yes   yes   -     yes   -        what is behind a gap is not found
        checkpoint at           end
        known             |---------------|
        hit               |---------|                            without checkpoints: all that is known
        computed                    |-----------------------|
    """

    num_tokens: int
    num_known_tokens: int  # tokens whose blocks of table 0 are cached; at least `num_tokens`
    blocks: Sequence[Block]  # of table 0, `num_tokens` tokens
    checkpoint: Checkpoint = NO_CHECKPOINT  # at the prefix's end, for models that need one


MISS = Hit(0, 0, ())


class KVCacheManager:
    """The device's part of an engine's KV cache: block tables and states of requests, and the prefix cache over them.

    `tiers` are the other parts, which the core addresses itself. This class tells them what the device caches.

    `hash_block` None disables prefix caching. `root_hash` is the parent hash of every sequence's first block.
    `checkpoint_positions` is needed for caching with windows or states. `host` None: there is no host tier. See
    `Tiers.of` for the rest.
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
        self._has_checkpoints = groups.has_checkpoints
        self._caches = hash_block is not None
        self._device = device = Pools.of(
            groups.num_blocks, groups.num_state_slots, num_windows=len(groups.windows), block_order=block_order
        )
        self._cache = device.cache
        self.retention = Retention(device, groups.block_size)
        self._hashes = BlockHashes(hash_block or _hash_nothing, root_hash, groups.block_size)
        self.encoder_blocks = self._cache.encoder_blocks
        self.tables = BlockTables(groups, device.blocks, self.encoder_blocks)
        self._states = StateSlots(device.states) if device.has_states else NoStateSlots()
        assert checkpoint_positions or not (self._caches and self._has_checkpoints)
        self._checkpoints = Checkpoints(groups, checkpoint_positions or nowhere, device, self.tables)
        self.tiers = NO_TIERS
        if host is not None and self._caches:
            self.tiers = Tiers.of(host, groups, self._hashes, device, mover, has_disk=has_disk, has_sources=has_sources)
        self.kv_events = self._cache.kv_events
        self.kv_events.host = self.tiers.host.kv_events

    def fill_stats(self, stats: SchedulerStats) -> None:
        """Set the fields of the statistics that describe the cache and its tiers."""
        stats.kv_cache_usage = max(self._device.blocks.usage, self._states.usage)
        stats.prefix_cache_queries, stats.prefix_cache_hits = self.num_queried_tokens, self.num_hit_tokens
        host = self.tiers.host
        stats.host_cache_usage, stats.load_bytes_per_second = host.usage, host.load_bytes_per_second
        stats.num_fetching_reqs = self.tiers.fetches.num_requests
        stats.num_retained_blocks = self._device.blocks.num_retained

    @property
    def occupancy(self) -> CacheOccupancy:
        """What the cache holds now. From any thread, because only lengths are read."""
        maps, slots = (self._cache.cached_blocks, *self._cache.cached_window_blocks), self._device.states
        num_free_states, num_cached_states = slots.num_free_blocks, len(self._cache.cached_states)
        fetches = self.tiers.fetches
        return CacheOccupancy(
            cached_blocks=tuple(map(len, maps)),
            num_checkpoints=len(self._cache.checkpoints),
            num_used_states=slots.num_blocks - num_free_states,
            num_cached_states=num_cached_states,
            num_free_states=max(num_free_states - num_cached_states, 0),
            host=self.tiers.host.occupancy,
            fetches=fetches.counts,
            disk=self.tiers.disk.occupancy(fetches.disk_counts),
        )

    def get_computed_blocks(self, request: Request) -> Hit:
        """Return the request's longest cached prefix that it can continue.

        At least the last token is left to compute. The hit is empty for a request that needs every token to be
        computed.
        """
        if not (self._caches and request.reads_prefix_cache):
            return MISS
        cached, blocks = self._cache.cached_blocks, list[Block]()
        for index in range((request.num_tokens - 1) // self._block_size):
            if not (block := cached.get(self._hashes.of(request, index))):
                break
            blocks.append(block)
        num_known = len(blocks) * self._block_size
        if not self._has_checkpoints:
            return Hit(num_known, num_known, blocks)
        for length in range(len(blocks), 0, -1):
            checkpoint = self._cache.checkpoints.get(request.block_hashes[length - 1])
            if checkpoint:
                return Hit(length * self._block_size, num_known, blocks[:length], checkpoint)
        return Hit(0, num_known, ())

    def is_cached(self, request: Request, num_tokens: int) -> bool:
        """Whether another request can continue the request's first `num_tokens` tokens, all of full blocks before its
        last token: their blocks are on the device or in host memory."""
        if self.get_computed_blocks(request).num_tokens >= num_tokens:
            return True
        _, num_usable = self.tiers.host.loads.held(self._hashes.full_blocks(request))
        return num_usable * self._block_size >= num_tokens

    def allocate_slots(self, request: Request, num_tokens: int, hit: Hit) -> list[list[int]] | None:
        """Allocate blocks and a state slot to a request without any, so that `num_tokens` tokens in total can be
        computed. `tables.extend` adds blocks later.

        Returns the ids of the blocks by table, those of the hit first, and -1 where a window needs no block. If there
        is not enough room, returns None and allocates nothing.
        """
        window_blocks, states = hit.checkpoint.window_blocks, hit.checkpoint.states
        if not self._states.can_allocate(states):
            return None
        block_ids = self.tables.allocate(request, num_tokens, hit.blocks, window_blocks)
        if block_ids is None:
            return None
        self._states.allocate(request, states)
        request.num_cached_blocks = len(hit.blocks) if self._caches else CACHES_NOTHING
        if self._has_checkpoints:
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
            if self._has_checkpoints:
                due = self._checkpoints.due(request, start, num_before)
                if row := self._states.plan(request, start, due, self._add_checkpoint):
                    steps[request.request_id] = row
        if self.tiers.host.has_planned:
            self.tiers.host.end_plan()
        if steps:
            self._states.free_read()
        return steps

    def free(self, request: Request) -> None:
        """Free the request's blocks and slot. Cached blocks stay in the prefix cache until they are allocated again."""
        if self._has_checkpoints:
            self._cache_full_blocks(request)
            position = self._checkpoints.last_position(request)
            if position:
                self._add_checkpoint(request, position, request.states)
        self.retention.keep(request)
        self.tables.free(request)
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
        self.retention.reset()
        if not keep_host:
            self.tiers.reset(since)
        for request in running:
            request.num_cached_blocks = CACHES_NOTHING

    def record_lookup(self, num_tokens: int, num_hits: int) -> None:
        self.num_queried_tokens += num_tokens
        self.num_hit_tokens += num_hits

    def check_integrity(self, requests: Sequence[Request], pending: Sequence[Request] = ()) -> None:
        """Raises `AssertionError` unless exactly the blocks of `requests`, all running ones, are in use, and only
        requests of `pending` wait for a fetch."""
        self._device.check_integrity()
        held_blocks, held_states = self.tiers.check_integrity(pending)
        self.tables.check_integrity(requests, held_blocks)
        self._states.check_integrity(requests, held_states)

    def _cache_full_blocks(self, request: Request) -> None:
        """Cache the full blocks of table 0 whose tokens are scheduled and known to the host."""
        num_full = min(request.num_computed_tokens, request.num_tokens) // self._block_size
        if num_full <= request.num_cached_blocks:
            return
        table = request.tables[0]
        cached: list[tuple[bytes, Block]] = []
        for index in range(request.num_cached_blocks, num_full):
            block = table[index]
            assert block, "table 0 has all blocks"
            block_hash = self._hashes.of(request, index)
            replaced = self._cache.add(block, block_hash)
            if replaced:
                self._device.blocks.demote(replaced)
            if block.cached_in is not None:
                cached.append((block_hash, block))
        self.tiers.host.stores.add_blocks(cached)
        request.num_cached_blocks = num_full

    def _add_checkpoint(self, request: Request, position: int, states: Sequence[Block]) -> None:
        self._checkpoints.add(request, position, states)
        self.tiers.host.stores.add_checkpoint(request.block_hashes[position // self._block_size - 1])


def _hash_nothing(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes | str]) -> bytes:
    raise AssertionError("prefix caching is disabled")
