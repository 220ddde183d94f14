"""KV events: which blocks can be found by their content, told as changes. Knows no blocks and no wire.

The pool says what it stores and removes; after each step the core takes what has gathered. While nobody follows,
nothing is kept.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class KvChanges:
    """Net changes, in the order in which they happened; apply `removed` before `stored`.

    No hash is in both: what was stored and removed again, or the other way round, has cancelled out. So there are
    never more of either than blocks. With `is_snapshot`, `stored` is everything that is held, and what was known
    before is void.
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
        """A block that was not held is held from now on."""
        if block_hash in self.removed:
            del self.removed[block_hash]
        else:
            self.stored[block_hash] = None

    def remove(self, block_hash: bytes) -> None:
        """A block that was held is not any more."""
        if block_hash in self.stored:
            del self.stored[block_hash]
        else:
            assert not self.is_snapshot, "what is removed was in the snapshot"
            self.removed[block_hash] = None

    def merge(self, later: "KvChanges") -> None:
        """Say what both say. `later` stays as it is."""
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
    """What a step's outputs say of the cache: what changed since the last, and all that is held now, if asked for."""

    changes: KvChanges
    snapshot: tuple[bytes, ...] | None = None


class KvEvents:
    """Between the pool, which reports, and the core, which takes. All on the core's thread."""

    def __init__(self, hashes: Collection[bytes]) -> None:
        """`hashes` is a view of all that can be found now, oldest first."""
        self._hashes = hashes
        self._changes: KvChanges | None = None  # none: nobody follows
        self._snapshot_due = False

    @property
    def is_untold(self) -> bool:
        return self._snapshot_due or bool(self._changes)

    def follow(self) -> None:
        """Somebody begins to follow, or has lost track: the next news hold a snapshot."""
        self._snapshot_due = True
        if self._changes is None:
            self._changes = KvChanges()

    def unfollow(self) -> None:
        """Nobody follows any more."""
        self._snapshot_due = False
        self._changes = None

    def take(self) -> KvEventBatch | None:
        """What has gathered; `None`: nothing."""
        if self._changes is None or not self.is_untold:
            return None
        news = KvEventBatch(self._changes, tuple(self._hashes) if self._snapshot_due else None)
        self._changes, self._snapshot_due = KvChanges(), False
        return news

    def stored(self, block_hash: bytes) -> None:
        if self._changes is not None:
            self._changes.store(block_hash)

    def removed(self, block_hash: bytes) -> None:
        if self._changes is not None:
            self._changes.remove(block_hash)

    def reset(self) -> None:
        """Nothing can be found any more."""
        if self._changes is not None:
            self._changes = KvChanges.snapshot()
