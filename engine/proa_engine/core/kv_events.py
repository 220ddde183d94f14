"""KV cache events: the hashes of blocks and checkpoints added to and removed from the prefix cache.

The KV cache manager records them, and the core adds them to each step's outputs. Nothing is recorded while there is no
subscriber.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class KvChanges:
    """Net changes of a set of hashes, in the order in which they happened; apply `removed` before `stored`.

    No hash is in both, because storing and removing the same hash cancel out. So neither has more entries than the set
    can have. With `is_snapshot`, `stored` is the whole content of the set and replaces all earlier changes.
    """

    is_snapshot: bool = False
    stored: dict[bytes, None] = field(default_factory=dict)  # ordered sets
    removed: dict[bytes, None] = field(default_factory=dict)

    @classmethod
    def snapshot(cls, hashes: Iterable[bytes] = ()) -> "KvChanges":
        return cls(is_snapshot=True, stored=dict.fromkeys(hashes))

    def __len__(self) -> int:
        return len(self.stored) + len(self.removed)

    def __bool__(self) -> bool:
        return self.is_snapshot or bool(self.stored or self.removed)

    def store(self, block_hash: bytes) -> None:
        """Record that a hash was added."""
        if block_hash in self.removed:
            del self.removed[block_hash]
        else:
            self.stored[block_hash] = None

    def remove(self, block_hash: bytes) -> None:
        """Record that a hash was removed."""
        if block_hash in self.stored:
            del self.stored[block_hash]
        else:
            assert not self.is_snapshot, "what is removed was in the snapshot"
            self.removed[block_hash] = None

    def apply(self, hashes: set[bytes]) -> None:
        """Make the changes in a copy of the set."""
        if self.is_snapshot:
            hashes.clear()
        hashes.difference_update(self.removed)
        hashes.update(self.stored)

    def merge(self, later: "KvChanges") -> None:
        """Append the changes of `later`, which is not modified."""
        if later.is_snapshot:
            self.is_snapshot = True
            self.stored, self.removed = dict(later.stored), {}
            return
        for block_hash in later.removed:
            self.remove(block_hash)
        for block_hash in later.stored:
            self.store(block_hash)


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Changes since the previous batch, and the whole content if there is a new subscriber.

    A checkpoint is identified by the hash of the block that ends there.
    """

    changes: KvChanges  # of the blocks
    snapshot: tuple[bytes, ...] | None = None
    checkpoints: KvChanges = field(default_factory=KvChanges)
    checkpoint_snapshot: tuple[bytes, ...] = ()  # complete if `snapshot` is not None
    host: "KvEventBatch | None" = None  # of the host tier; None: nothing changed


class NoChanges:
    """The changes while there is no subscriber: nothing is recorded."""

    def store(self, block_hash: bytes) -> None: ...

    def remove(self, block_hash: bytes) -> None: ...


class NoKvEvents:
    """The events of a tier that does not exist."""

    has_pending = False

    def follow(self) -> None: ...

    def unfollow(self) -> None: ...

    def take(self) -> None: ...


NO_CHANGES = NoChanges()
NO_KV_EVENTS = NoKvEvents()


class KvEvents:
    """Collects changes between steps: those of `blocks` and of `checkpoints`, which the prefix cache records. Used on
    the core's thread only. `host`: those of the host tier, which are followed with these."""

    def __init__(self, hashes: Collection[bytes], checkpoints: Collection[bytes] = ()) -> None:
        """`hashes` and `checkpoints` are live views of the prefix cache's blocks and checkpoints, oldest first."""
        self.blocks: KvChanges | NoChanges = NO_CHANGES
        self.checkpoints: KvChanges | NoChanges = NO_CHANGES
        self.host: KvEvents | NoKvEvents = NO_KV_EVENTS
        self._hashes = hashes
        self._checkpoint_hashes = checkpoints
        self._snapshot_due = False

    @property
    def has_pending(self) -> bool:
        if self.blocks is NO_CHANGES:
            return False
        return self._snapshot_due or bool(self.blocks or self.checkpoints) or self.host.has_pending

    def follow(self) -> None:
        """Start recording, and include a snapshot in the next batch."""
        self._snapshot_due = True
        if self.blocks is NO_CHANGES:
            self.blocks, self.checkpoints = KvChanges(), KvChanges()
        self.host.follow()

    def unfollow(self) -> None:
        """Stop recording."""
        self._snapshot_due = False
        self.blocks = self.checkpoints = NO_CHANGES
        self.host.unfollow()

    def take(self) -> KvEventBatch | None:
        """Return the changes recorded since the last call; None if there are none."""
        blocks, checkpoints = self.blocks, self.checkpoints
        if isinstance(blocks, NoChanges) or isinstance(checkpoints, NoChanges) or not self.has_pending:
            return None
        host = self.host.take()
        if self._snapshot_due:
            batch = KvEventBatch(blocks, tuple(self._hashes), checkpoints, tuple(self._checkpoint_hashes), host)
        else:
            batch = KvEventBatch(blocks, None, checkpoints, host=host)
        self.blocks, self.checkpoints, self._snapshot_due = KvChanges(), KvChanges(), False
        return batch

    def reset(self) -> None:
        """Record that the prefix cache was emptied."""
        if self.blocks is not NO_CHANGES:
            self.blocks, self.checkpoints = KvChanges.snapshot(), KvChanges.snapshot()
