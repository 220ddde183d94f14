"""Subscriptions to KV events that are read at once, slowly, or started late."""

import asyncio
import random
from collections.abc import Iterable

import pytest

from proa_engine.core.kv_events import KvChanges, KvEventBatch
from proa_engine.server.errors import Draining
from proa_engine.server.kv_events import KvEventPublisher, KvSubscription

NUM_BLOCKS = 8


class Cache:
    """A cache of random content that reports changes as the core does."""

    def __init__(self, seed: int = 0) -> None:
        self.held: dict[bytes, None] = {}
        self.checkpoints: dict[bytes, None] = {}
        self.host: dict[bytes, None] = {}
        self.follows = False
        self._rng = random.Random(seed)
        self._snapshot_due = False

    def follow_kv_events(self) -> None:
        self.follows = self._snapshot_due = True

    def unfollow_kv_events(self) -> None:
        self.follows = False

    def batch(
        self,
        *,
        stored: Iterable[bytes] = (),
        removed: Iterable[bytes] = (),
        checkpoints_stored: Iterable[bytes] = (),
        checkpoints_removed: Iterable[bytes] = (),
        host_stored: Iterable[bytes] = (),
        host_removed: Iterable[bytes] = (),
    ) -> KvEventBatch:
        blocks = self._change(self.held, stored, removed)
        checkpoints = self._change(self.checkpoints, checkpoints_stored, checkpoints_removed)
        due, self._snapshot_due = self._snapshot_due, False
        host = KvEventBatch(self._change(self.host, host_stored, host_removed), tuple(self.host) if due else None)
        if due:
            return KvEventBatch(blocks, tuple(self.held), checkpoints, tuple(self.checkpoints), host)
        return KvEventBatch(blocks, None, checkpoints, host=host if host.changes else None)

    def random_batch(self) -> KvEventBatch:
        hashes = [bytes([number]) for number in range(40)]
        free = [block_hash for block_hash in hashes if block_hash not in self.held]
        removed = self._rng.sample(list(self.held), min(len(self.held), self._rng.randint(0, 3)))
        room = NUM_BLOCKS - len(self.held) + len(removed)
        stored = self._rng.sample(free, min(room, 2))
        checkpoints_removed = self._rng.sample(
            list(self.checkpoints), min(len(self.checkpoints), self._rng.randint(0, 1))
        )
        new = [block_hash for block_hash in self.held if block_hash not in self.checkpoints]
        return self.batch(
            stored=stored,
            removed=removed,
            checkpoints_stored=self._rng.sample(new, min(len(new), self._rng.randint(0, 1))),
            checkpoints_removed=checkpoints_removed,
            host_removed=self._rng.sample(list(self.host), max(len(self.host) - NUM_BLOCKS + 2, 0)),
            host_stored=[block_hash for block_hash in stored if block_hash not in self.host],
        )

    def _change(self, held: dict[bytes, None], stored: Iterable[bytes], removed: Iterable[bytes]) -> KvChanges:
        changes = KvChanges()
        for block_hash in removed:
            del held[block_hash]
            changes.remove(block_hash)
        for block_hash in stored:
            held[block_hash] = None
            changes.store(block_hash)
        return changes


class Reader:
    """Applies messages to its copy of the cache, as a client does."""

    def __init__(self, subscription: KvSubscription) -> None:
        self.subscription = subscription
        self.held: set[bytes] = set()
        self.checkpoints: set[bytes] = set()
        self.host: set[bytes] = set()
        self.sequence = 0
        self.num_snapshots = 0

    async def read(self) -> KvChanges:
        async with asyncio.timeout(5):
            sequence, device, host = await self.subscription.next_message()
        changes, checkpoints = device.blocks, device.checkpoints
        assert sequence == self.sequence + 1
        self.sequence = sequence
        self.num_snapshots += changes.is_snapshot
        assert changes.is_snapshot == checkpoints.is_snapshot
        if changes.is_snapshot:
            self.held.clear()
            self.checkpoints.clear()
        self.held -= changes.removed.keys()
        self.held |= changes.stored.keys()
        self.checkpoints -= checkpoints.removed.keys()
        self.checkpoints |= checkpoints.stored.keys()
        if host.blocks.is_snapshot:
            self.host.clear()
        self.host -= host.blocks.removed.keys()
        self.host |= host.blocks.stored.keys()
        return changes

    def agrees_with(self, cache: Cache) -> bool:
        of_device = self.held == cache.held.keys() and self.checkpoints == cache.checkpoints.keys()
        return of_device and self.host == cache.host.keys()


async def begin(publisher: KvEventPublisher, cache: Cache, max_pending: int = NUM_BLOCKS) -> Reader:
    """A subscriber that has received its snapshot."""
    reader = Reader(publisher.subscribe(cache, max_pending))
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.deliver(cache.batch())
    assert (await reading).is_snapshot
    return reader


async def test_late_subscriber_gets_a_snapshot_and_the_others_only_changes() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    early = await begin(publisher, cache)
    publisher.deliver(cache.batch(stored=[b"a", b"b"]))
    assert (await early.read()).stored.keys() == {b"a", b"b"}
    late = await begin(publisher, cache)
    assert late.held == {b"a", b"b"}
    publisher.deliver(cache.batch(stored=[b"c"], removed=[b"a"]))
    for reader in (early, late):
        changes = await reader.read()
        assert (changes.is_snapshot, [*changes.stored], [*changes.removed]) == (False, [b"c"], [b"a"])


async def test_changes_before_the_snapshot_are_sent_only_in_the_snapshot() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = Reader(publisher.subscribe(cache, NUM_BLOCKS))
    publisher.deliver(cache.batch(stored=[b"a"]))  # before the snapshot is requested
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.deliver(cache.batch(stored=[b"b"]))
    assert [*(await reading).stored] == [b"a", b"b"]


async def test_slow_subscriber_gets_merged_changes_and_a_very_slow_one_a_new_snapshot() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = await begin(publisher, cache)
    for name in (b"a", b"b"):
        publisher.deliver(cache.batch(stored=[name]))
    assert [*(await reader.read()).stored] == [b"a", b"b"]
    publisher.deliver(cache.batch(stored=[b"%d" % number for number in range(5)], removed=[b"a", b"b"]))
    publisher.deliver(cache.batch(stored=[b"x", b"y"]))
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.deliver(cache.batch())
    assert (await reading).is_snapshot
    assert reader.held == cache.held.keys()


@pytest.mark.parametrize("seed", range(20))
async def test_subscribers_of_any_speed_end_with_the_content_of_the_cache(seed: int) -> None:
    rng, publisher, cache = random.Random(seed), KvEventPublisher(), Cache(seed)
    readers = [await begin(publisher, cache, 2 * NUM_BLOCKS) for _ in range(3)]

    async def follow(reader: Reader, read_share: float) -> None:
        while True:
            if rng.random() < read_share:
                await reader.read()
            await asyncio.sleep(0)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        following = [group.create_task(follow(*pair)) for pair in zip(readers, (1.0, 0.3, 0.05), strict=True)]
        for _ in range(300):
            publisher.deliver(cache.random_batch())
            await asyncio.sleep(0)
        while not all(reader.agrees_with(cache) for reader in readers):
            publisher.deliver(cache.batch())
            await asyncio.sleep(0)
        for task in following:
            task.cancel()
    assert readers[0].num_snapshots == 1
    assert readers[2].num_snapshots > 1


async def test_changes_of_checkpoints_alone_are_a_message() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = await begin(publisher, cache)
    publisher.deliver(cache.batch(checkpoints_stored=[b"a"]))
    await reader.read()
    assert reader.checkpoints == {b"a"}
    publisher.deliver(cache.batch(checkpoints_removed=[b"a"]))
    await reader.read()
    assert reader.agrees_with(cache)
    assert reader.num_snapshots == 1


async def test_changes_of_the_host_alone_are_a_message() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = await begin(publisher, cache)
    publisher.deliver(cache.batch(host_stored=[b"a", b"b"]))
    await reader.read()
    assert reader.host == {b"a", b"b"}
    assert reader.num_snapshots == 1
    late = await begin(publisher, cache)
    assert late.host == {b"a", b"b"}


async def test_blocks_and_checkpoints_together_are_bounded_except_in_a_snapshot() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = await begin(publisher, cache)
    hashes = [b"%d" % number for number in range(NUM_BLOCKS)]
    publisher.deliver(cache.batch(stored=hashes))
    publisher.deliver(cache.batch(checkpoints_stored=hashes))
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.deliver(cache.batch())
    assert (await reading).is_snapshot
    assert reader.agrees_with(cache)


async def test_core_stops_reporting_when_the_last_subscriber_leaves() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    first, second = await begin(publisher, cache), await begin(publisher, cache)
    with first.subscription:
        pass
    assert cache.follows
    with second.subscription:
        pass
    assert not cache.follows


async def test_failure_ends_every_subscription() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = await begin(publisher, cache)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.fail(Draining("bye"))
    with pytest.raises(Draining, match="bye"):
        await reading
