"""Fetches: blocks of new requests that come from disk or from other engines, into pages of host memory.

A request whose blocks are on disk, or that has a `kv_source`, waits, before it is queued, until its job has ended. Then
it finds what has come as any request does, and loads it. What has not come is computed, so a fetch that fails affects
nothing but time.

A job's pages are reserved until it has ended, also if its requests were aborted, because the mover still writes them.

A job has a time as a whole, in proportion to what computing its blocks would take. Clients choose sources and waits, so
a request waits for the job of another one only if it has the same source and ends little later than its own would.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice, takewhile
from typing import NamedTuple

from proa.contract import KvFetch, KvSource
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.disk_tier import DiskTier, NoDiskTier
from proa_engine.core.kv.host_tier import HostTier
from proa_engine.core.kv.mover import MAX_CHAIN, MAX_JOB_MS, MAX_WAIT_MS, Fetched, FetchJob, Mover
from proa_engine.core.kv.prefix_cache import BlockHashes
from proa_engine.core.kv.state_slots import slot_of
from proa_engine.core.request import Request
from proa_engine.core.types import Block, FetchCounts

_WAIT_MS = 2000  # for the disk, and for a source without `wait_ms`
_TIMES_COMPUTED = 10  # a job may take as many times as long as computing its blocks, beside its wait
_UNKNOWN_RATE = 5000.0  # tokens a second, before the engine has computed a prompt
_TIMES_OWN = 2  # a request waits for a job that ends before its own had taken as many times its time
_MAX_JOBS = 256  # at the same time: each is a thread of the mover, and sources answer as many

_Key = tuple[tuple[str, ...], bytes]  # addresses of the source, and the first block that is fetched


class _Origin(NamedTuple):
    """From where blocks are fetched: another engine, or the disk, which has no addresses. See `KvSource`."""

    addresses: tuple[str, ...] = ()
    num_blocks: int = 0
    wait_ms: int = 0


_DISK = _Origin()


@dataclass(slots=True, eq=False)
class _Open:
    """A job that has not ended, and all pages and states that it references."""

    job: FetchJob
    held: list[Block]  # pages of the leading blocks that are not fetched
    pages: list[Block]
    tails: list[list[Block]]
    states: list[Block]
    requests: list[Request]
    is_stale: bool = False  # the cache was emptied since it began
    started: float = field(kw_only=True)

    @property
    def latest_end(self) -> float:
        return self.started + self.job.max_ms / 1000

    @property
    def all_pages(self) -> list[Block]:
        return [*self.held, *self.pages, *chain.from_iterable(self.tails)]


class Fetches:
    """The fetches of an engine. Used on the core's thread only. Sources of requests are ignored without `has_sources`,
    which is that the mover fetches from other engines."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | NoDiskTier,
        mover: Mover,
        groups: CacheGroups,
        hashes: BlockHashes,
        *,
        has_sources: bool,
    ) -> None:
        self._host = host
        self._disk = disk
        self._mover = mover
        self._groups = groups
        self._hashes = hashes
        self._has_sources = has_sources
        self._job_ids = count(1)
        self._open: dict[int, _Open] = {}  # by job id
        self._by_key: dict[_Key, _Open] = {}
        self._by_request: dict[Request, _Open] = {}
        self.counts = FetchCounts()  # from other engines
        self.disk_counts = FetchCounts()
        self._since = 0.0  # Unix seconds; blocks from before it are not fetched

    def begin(self, request: Request, source: KvSource | None, now: float, prefill_rate: float) -> bool:
        """Fetch the request's blocks that are neither on the device nor in host memory, if they are enough tokens: from
        disk, unless `source`, another engine, has more of them.

        Returns whether the request must wait; then `take` returns it later. A request that lacks the same blocks as one
        that waits already waits for the same job. `prefill_rate`: tokens that the engine computes a second; 0: not
        known.
        """
        origin = _DISK
        if source and self._has_sources:
            origin = _Origin(source.addresses, source.num_blocks, source.wait_ms)
        if not request.reads_prefix_cache or not (origin.addresses or self._disk.blocks):
            return False
        candidates: Iterable[bytes] = islice(self._hashes.full_blocks(request), MAX_CHAIN)
        if not origin.addresses:  # no more blocks are hashed than can be of use
            candidates = takewhile(self._is_known, candidates)
        block_hashes = list(candidates)
        num_held, num_usable = self._host.loads.held(block_hashes)
        num_on_disk = self._disk.extent(block_hashes, num_held)
        num_at_source = (origin.num_blocks or len(block_hashes)) if origin.addresses else 0
        if num_on_disk >= min(num_at_source, len(block_hashes)):
            origin = _DISK
        del block_hashes[num_at_source if origin.addresses else num_on_disk :]
        if (len(block_hashes) - num_usable) * self._groups.block_size < self._host.loads.min_tokens:
            return False
        num_held = min(num_held, len(block_hashes))
        wait_ms = min(origin.wait_ms or _WAIT_MS, MAX_WAIT_MS)
        num_tokens = (len(block_hashes) - num_held) * self._groups.block_size
        max_ms = min(wait_ms + round(1000 * _TIMES_COMPUTED * num_tokens / (prefill_rate or _UNKNOWN_RATE)), MAX_JOB_MS)
        first = block_hashes[min(num_held, len(block_hashes) - 1)]
        key = origin.addresses, first
        opened = self._by_key.get(key)
        if not opened or opened.latest_end > now + _TIMES_OWN * max_ms / 1000:
            opened = self._start(block_hashes, num_held, origin, now, wait_ms=wait_ms, max_ms=max_ms)
        if not opened:
            return False
        self._by_key[key] = self._by_request[request] = opened
        opened.requests.append(request)
        return True

    @property
    def num_requests(self) -> int:
        """Number of requests that wait for a job."""
        return len(self._by_request)

    def is_fetching(self, request: Request) -> bool:
        """Whether the request waits for a job."""
        return request in self._by_request

    def end(self, request: Request) -> None:
        """Stop waiting for the request's job, if there is one; the last request to stop cancels it."""
        opened = self._by_request.pop(request, None)
        if not opened:
            return
        opened.requests.remove(request)
        if not opened.requests:
            self._cancel(opened)

    def take(self, fetched: Fetched, now: float) -> Sequence[Request]:
        """If the job has ended, cache what it brought, and return the requests that waited for it."""
        if not fetched.is_done:
            return ()
        opened = self._open.pop(fetched.job_id)
        self._forget(opened)
        if not opened.is_stale:
            self._cache(opened, fetched)
        self._host.pools.free(opened.all_pages, opened.states)
        num_tokens = fetched.num_blocks * self._groups.block_size
        ended = KvFetch(opened.started, now, num_tokens, fetched.num_bytes, fetched.error)
        is_disk = not opened.job.addresses
        if is_disk:
            self.disk_counts = self.disk_counts.plus(ended)
        else:
            self.counts = self.counts.plus(ended)
        for request in opened.requests:
            if is_disk:
                request.disk_read = ended
            else:
                request.fetch = ended
            del self._by_request[request]
        return opened.requests

    def reset(self, since: float) -> None:
        """Cancel all jobs and forget what they bring, because the cache was emptied at `since`, in Unix seconds."""
        self._since = max(since, self._since)
        self._mover.reset(self._since, self._host.serial)
        self._disk.reset()
        for opened in self._open.values():
            opened.is_stale = True
            self._cancel(opened)

    def check_integrity(self, pending: Sequence[Request]) -> tuple[list[Block], list[Block]]:
        """Raises `AssertionError` if a request waits for a job that does not know it, or is not among `pending`.

        Returns the pages and states that jobs reference, once for each reference.
        """
        assert self._by_request.keys() <= set(pending)
        opened = self._open.values()
        assert sorted(map(id, self._by_request)) == sorted(id(request) for each in opened for request in each.requests)
        return [page for each in opened for page in each.all_pages], [state for each in opened for state in each.states]

    def _cancel(self, opened: _Open) -> None:
        self._forget(opened)
        self._mover.cancel(opened.job.job_id)

    def _forget(self, opened: _Open) -> None:
        """Let no further request wait for the job."""
        self._by_key = {key: other for key, other in self._by_key.items() if other is not opened}

    def _is_known(self, block_hash: bytes) -> bool:
        """Whether a block is on the device, in host memory or on disk."""
        return block_hash in self._disk.blocks or self._host.loads.held([block_hash])[0] > 0

    def _start(
        self,
        block_hashes: Sequence[bytes],
        num_held: int,
        origin: _Origin,
        now: float,
        *,
        wait_ms: int,
        max_ms: int,
    ) -> _Open | None:
        """Reserve pages for all missing blocks, or as many as are free, and start a job. None if there is no room."""
        if len(self._open) >= _MAX_JOBS:
            return None
        groups, host = self._groups, self._host.pools
        held = self._host.touch(block_hashes[:num_held])
        sizes = [self._tail_columns(window, len(block_hashes)) for window in groups.windows]
        num_pages = min(len(block_hashes) - num_held, host.blocks.num_free_blocks - sum(map(len, sizes)))
        # With checkpoints the end of the prefix is of no use without all that is before it, nor that without the end.
        least = len(block_hashes) - num_held if groups.has_checkpoints else 1
        if num_pages < least or host.states.num_free_blocks < host.has_states:
            host.blocks.free_blocks(held)
            return None
        pages, *tails = (host.blocks.get_new_blocks(size) for size in (num_pages, *map(len, sizes)))
        states = host.states.get_new_blocks(int(host.has_states))
        job = FetchJob(
            job_id=next(self._job_ids),
            addresses=origin.addresses,
            chain=tuple(block_hashes[: num_held + num_pages]),
            num_held=num_held,
            pages=tuple(page.block_id for page in pages),
            needs_checkpoint=groups.has_checkpoints,
            tails=tuple(tuple(page.block_id for page in tail) for tail in tails),
            state=slot_of(states),
            copied=self._host.serial,
            wait_ms=wait_ms,
            max_ms=max_ms,
            since=self._since,
        )
        opened = self._open[job.job_id] = _Open(job, held, pages, tails, states, [], started=now)
        self._mover.fetch(job)
        return opened

    def _cache(self, opened: _Open, fetched: Fetched) -> None:
        """Cache the filled pages, where the next lookups find them."""
        job, host = opened.job, self._host.pools
        filled = range(job.num_held, job.num_held + fetched.num_blocks)
        for index, page in zip(filled, opened.pages, strict=False):
            host.cache_block(page, job.chain[index])
        if not fetched.checkpoint or fetched.checkpoint in host.cache.checkpoints:
            return
        num_columns = job.chain.index(fetched.checkpoint) + 1
        window_pages = [
            [(job.chain[column], tail[num_columns - 1 - column]) for column in self._tail_columns(window, num_columns)]
            for window, tail in zip(self._groups.windows, opened.tails, strict=True)
        ]
        host.cache.add_checkpoint(fetched.checkpoint, window_pages, opened.states)

    def _tail_columns(self, window: int, num_columns: int) -> range:
        """Return the columns that a checkpoint behind `num_columns` blocks needs in a table with this window."""
        return range(self._groups.first_column(window, num_columns * self._groups.block_size), num_columns)


class NoFetches:
    """An engine without a mover: nothing is fetched."""

    counts = None
    disk_counts = FetchCounts()
    num_requests = 0

    def begin(self, request: Request, source: KvSource | None, now: float, prefill_rate: float) -> bool:
        return False

    def is_fetching(self, request: Request) -> bool:
        return False

    def end(self, request: Request) -> None: ...

    def take(self, fetched: Fetched, now: float) -> Sequence[Request]:
        raise AssertionError("only a mover fetches")

    def reset(self, since: float) -> None: ...

    def check_integrity(self, pending: Sequence[Request]) -> tuple[Sequence[Block], Sequence[Block]]:
        return (), ()
