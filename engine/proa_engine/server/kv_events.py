"""KvEventPublisher: sends changes of the prefix cache to SubscribeKvEvents calls. Runs on the I/O thread.

Each subscription has one pending message into which later steps' changes merge. It starts with a snapshot, which it
requests from the core on its first read. If the merged changes outgrow the cache itself, it starts over with a new
snapshot.
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from proa_engine.core.kv_events import KvChanges, KvEventBatch
from proa_engine.server.errors import EngineError


class KvEventSource(Protocol):
    """The part of `EngineCore` that subscriptions call. Every method is thread-safe."""

    def follow_kv_events(self) -> None: ...

    def unfollow_kv_events(self) -> None: ...


class _Snapshot(Enum):
    NEEDED = auto()
    REQUESTED = auto()
    TAKEN = auto()  # later changes are merged into what is pending


@dataclass(slots=True)
class TierChanges:
    """Pending changes of the device's cache or of the host's. Both sets are snapshots, or neither."""

    blocks: KvChanges = field(default_factory=KvChanges)
    checkpoints: KvChanges = field(default_factory=KvChanges)

    @classmethod
    def snapshot(cls, batch: KvEventBatch | None) -> "TierChanges":
        """The whole content in a batch that has a snapshot; None: the tier does not exist."""
        if batch is None:
            return cls(KvChanges.snapshot(), KvChanges.snapshot())
        assert batch.snapshot is not None, "tiers are followed together"
        return cls(KvChanges.snapshot(batch.snapshot), KvChanges.snapshot(batch.checkpoint_snapshot))

    def __bool__(self) -> bool:
        return bool(self.blocks or self.checkpoints)

    @property
    def num_changes(self) -> int:
        """0 of a snapshot: it has no more entries than the tier, whose checkpoints may add to the number of blocks."""
        return 0 if self.blocks.is_snapshot else len(self.blocks) + len(self.checkpoints)

    def merge(self, batch: KvEventBatch) -> None:
        self.blocks.merge(batch.changes)
        self.checkpoints.merge(batch.checkpoints)


class KvSubscription:
    """One subscriber, as a context manager that unsubscribes at its end."""

    def __init__(self, publisher: "KvEventPublisher", core: KvEventSource, max_pending: int) -> None:
        self._publisher = publisher
        self._core = core
        self._max_pending = max_pending
        self._snapshot = _Snapshot.NEEDED
        self._device, self._host = TierChanges(), TierChanges()  # pending
        self._sequence = 0
        self._error: EngineError | None = None
        self._wake = asyncio.Event()

    def __enter__(self) -> "KvSubscription":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._publisher.unsubscribe(self, self._core)

    async def next_message(self) -> tuple[int, TierChanges, TierChanges]:
        """Wait for changes; return a sequence number, counted from 1, and the changes of the device and of the host.

        The first message has snapshots of both. Raises EngineError when the engine drains or fails.
        """
        while not (self._device or self._host):
            if self._error is not None:
                raise self._error
            if self._snapshot is _Snapshot.NEEDED:
                self._snapshot = _Snapshot.REQUESTED
                self._core.follow_kv_events()
            self._wake.clear()
            await self._wake.wait()
        device, host = self._device, self._host
        self._device, self._host = TierChanges(), TierChanges()
        self._sequence += 1
        return self._sequence, device, host

    def deliver(self, batch: KvEventBatch) -> None:
        if self._snapshot is _Snapshot.TAKEN:
            self._device.merge(batch)
            if batch.host is not None:
                self._host.merge(batch.host)
        elif self._snapshot is _Snapshot.REQUESTED and batch.snapshot is not None:
            self._snapshot = _Snapshot.TAKEN
            self._device, self._host = TierChanges.snapshot(batch), TierChanges.snapshot(batch.host)
        if self._device.num_changes + self._host.num_changes > self._max_pending:
            self._snapshot = _Snapshot.NEEDED
            self._device, self._host = TierChanges(), TierChanges()
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._wake.set()


class KvEventPublisher:
    """All subscriptions. The core reports changes only while there are any."""

    def __init__(self) -> None:
        self._subscriptions: set[KvSubscription] = set()

    def subscribe(self, core: KvEventSource, num_blocks: int) -> KvSubscription:
        """Subscribe to tiers of `num_blocks` together, which is also the maximum of pending changes."""
        subscription = KvSubscription(self, core, max_pending=num_blocks)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: KvSubscription, core: KvEventSource) -> None:
        self._subscriptions.remove(subscription)
        if not self._subscriptions:
            core.unfollow_kv_events()

    def deliver(self, batch: KvEventBatch) -> None:
        for subscription in self._subscriptions:
            subscription.deliver(batch)

    def fail(self, error: EngineError) -> None:
        """End all subscriptions: nothing more is delivered."""
        for subscription in self._subscriptions:
            subscription.fail(error)
