"""Subscribers of KV events: who reads at once, who reads slowly, and who comes late."""

import asyncio
import random
from collections.abc import Iterable

import pytest

from proa_engine.core.kv_events import KvChanges, KvEventBatch
from proa_engine.server.errors import Draining
from proa_engine.server.kv_events import KvEventPublisher, KvSubscription

NUM_BLOCKS = 8


class Cache:
    """A cache of random content, which tells of itself as the core does."""

    def __init__(self, seed: int = 0) -> None:
        self.held: dict[bytes, None] = {}
        self.follows = False
        self._rng = random.Random(seed)
        self._snapshot_due = False

    def follow_kv_events(self) -> None:
        self.follows = self._snapshot_due = True

    def unfollow_kv_events(self) -> None:
        self.follows = False

    def news(self, *, stored: Iterable[bytes] = (), removed: Iterable[bytes] = ()) -> KvEventBatch:
        changes = KvChanges()
        for block_hash in removed:
            del self.held[block_hash]
            changes.remove(block_hash)
        for block_hash in stored:
            self.held[block_hash] = None
            changes.store(block_hash)
        due, self._snapshot_due = self._snapshot_due, False
        return KvEventBatch(changes, tuple(self.held) if due else None)

    def random_news(self) -> KvEventBatch:
        hashes = [bytes([number]) for number in range(40)]
        free = [block_hash for block_hash in hashes if block_hash not in self.held]
        removed = self._rng.sample(list(self.held), min(len(self.held), self._rng.randint(0, 3)))
        room = NUM_BLOCKS - len(self.held) + len(removed)
        return self.news(stored=self._rng.sample(free, min(room, 2)), removed=removed)


class Reader:
    """Applies messages as a subscriber does."""

    def __init__(self, subscription: KvSubscription) -> None:
        self.subscription = subscription
        self.held: set[bytes] = set()
        self.sequence = 0
        self.num_snapshots = 0

    async def read(self) -> KvChanges:
        async with asyncio.timeout(5):
            sequence, changes = await self.subscription.next_message()
        assert sequence == self.sequence + 1
        self.sequence = sequence
        self.num_snapshots += changes.is_snapshot
        if changes.is_snapshot:
            self.held.clear()
        self.held -= changes.removed.keys()
        self.held |= changes.stored.keys()
        return changes


async def begin(publisher: KvEventPublisher, cache: Cache) -> Reader:
    """A subscriber that has asked for its snapshot and got it."""
    reader = Reader(publisher.subscribe(cache, NUM_BLOCKS))
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.deliver(cache.news())
    assert (await reading).is_snapshot
    return reader


async def test_a_late_subscriber_gets_a_snapshot_and_the_others_only_what_changed() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    early = await begin(publisher, cache)
    publisher.deliver(cache.news(stored=[b"a", b"b"]))
    assert (await early.read()).stored.keys() == {b"a", b"b"}
    late = await begin(publisher, cache)
    assert late.held == {b"a", b"b"}
    publisher.deliver(cache.news(stored=[b"c"], removed=[b"a"]))
    for reader in (early, late):
        changes = await reader.read()
        assert (changes.is_snapshot, [*changes.stored], [*changes.removed]) == (False, [b"c"], [b"a"])


async def test_what_changed_between_subscribing_and_the_snapshot_is_not_told_twice() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = Reader(publisher.subscribe(cache, NUM_BLOCKS))
    publisher.deliver(cache.news(stored=[b"a"]))  # it has not even asked
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.deliver(cache.news(stored=[b"b"]))
    assert [*(await reading).stored] == [b"a", b"b"]


async def test_a_slow_subscriber_gets_one_message_and_a_very_slow_one_a_new_snapshot() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = await begin(publisher, cache)
    for name in (b"a", b"b"):
        publisher.deliver(cache.news(stored=[name]))
    assert [*(await reader.read()).stored] == [b"a", b"b"]
    publisher.deliver(cache.news(stored=[b"%d" % number for number in range(5)], removed=[b"a", b"b"]))
    publisher.deliver(cache.news(stored=[b"x", b"y"]))
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.deliver(cache.news())
    assert (await reading).is_snapshot
    assert reader.held == cache.held.keys()


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_reads_in_the_end_knows_what_is_held(seed: int) -> None:
    rng, publisher, cache = random.Random(seed), KvEventPublisher(), Cache(seed)
    readers = [await begin(publisher, cache) for _ in range(3)]

    async def follow(reader: Reader, patience: float) -> None:
        while True:
            if rng.random() < patience:
                await reader.read()
            await asyncio.sleep(0)

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        following = [group.create_task(follow(*pair)) for pair in zip(readers, (1.0, 0.3, 0.05), strict=True)]
        for _ in range(300):
            publisher.deliver(cache.random_news())
            await asyncio.sleep(0)
        while any(reader.held != cache.held.keys() for reader in readers):
            publisher.deliver(cache.news())
            await asyncio.sleep(0)
        for task in following:
            task.cancel()
    assert readers[0].num_snapshots == 1
    assert readers[2].num_snapshots > 1


async def test_the_core_is_told_when_the_last_subscriber_leaves() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    first, second = await begin(publisher, cache), await begin(publisher, cache)
    with first.subscription:
        pass
    assert cache.follows
    with second.subscription:
        pass
    assert not cache.follows


async def test_an_engine_that_leaves_ends_every_subscription() -> None:
    publisher, cache = KvEventPublisher(), Cache()
    reader = await begin(publisher, cache)
    reading = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    publisher.fail(Draining("bye"))
    with pytest.raises(Draining, match="bye"):
        await reading
