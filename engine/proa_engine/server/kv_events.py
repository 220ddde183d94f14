"""KvEvents' way to subscribers: each has one pending message into which later steps' changes merge.

Runs on the I/O thread. A subscriber begins without knowing anything, and asks the core for a snapshot when it reads;
one that reads so slowly that its changes are longer than a snapshot would be begins again.
"""

import asyncio
from enum import Enum, auto
from typing import Protocol

from proa_engine.core.kv_events import KvChanges, KvEventBatch
from proa_engine.server.errors import EngineError


class FollowedCore(Protocol):
    """What the feed needs of the engine core; any thread."""

    def follow_kv_events(self) -> None: ...

    def unfollow_kv_events(self) -> None: ...


class _Knows(Enum):
    NOTHING = auto()
    SOON = auto()  # a snapshot has been asked for
    ALL = auto()  # with what is pending


class KvSubscription:
    """One subscriber. To be used in a `with`."""

    def __init__(self, feed: "KvFeed", core: FollowedCore, max_pending: int) -> None:
        self._feed = feed
        self._core = core
        self._max_pending = max_pending
        self._knows = _Knows.NOTHING
        self._pending = KvChanges()
        self._sequence = 0
        self._error: EngineError | None = None
        self._wake = asyncio.Event()

    def __enter__(self) -> "KvSubscription":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._feed.unsubscribe(self, self._core)

    async def next_message(self) -> tuple[int, KvChanges]:
        """What is new, with its sequence number. Raises EngineError when the engine leaves."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._knows is _Knows.NOTHING:
                self._knows = _Knows.SOON
                self._core.follow_kv_events()
            self._wake.clear()
            await self._wake.wait()
        changes, self._pending = self._pending, KvChanges()
        self._sequence += 1
        return self._sequence, changes

    def deliver(self, news: KvEventBatch) -> None:
        if self._knows is _Knows.ALL:
            self._pending.merge(news.changes)
        elif self._knows is _Knows.SOON and news.snapshot is not None:
            self._knows = _Knows.ALL
            self._pending = KvChanges.snapshot(news.snapshot)
        if len(self._pending) > self._max_pending:
            self._knows = _Knows.NOTHING
            self._pending = KvChanges()
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._wake.set()


class KvFeed:
    """All subscribers. The core tells of its cache only while there are any."""

    def __init__(self) -> None:
        self._subscriptions: set[KvSubscription] = set()

    def subscribe(self, core: FollowedCore, num_blocks: int) -> KvSubscription:
        """For a cache of `num_blocks`, which bounds what waits for the subscriber."""
        subscription = KvSubscription(self, core, max_pending=num_blocks)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: KvSubscription, core: FollowedCore) -> None:
        self._subscriptions.remove(subscription)
        if not self._subscriptions:
            core.unfollow_kv_events()

    def deliver(self, news: KvEventBatch) -> None:
        for subscription in self._subscriptions:
            subscription.deliver(news)

    def fail(self, error: EngineError) -> None:
        """Nothing more will come."""
        for subscription in self._subscriptions:
            subscription.fail(error)
