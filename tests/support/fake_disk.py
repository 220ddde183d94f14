"""FakeDisk: what is on the disks of an engine's movers, and the changes that they have not reported."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proa_engine.core.kv.mover import DiskChanges
from proa_engine.core.kv_events import KvChanges
from proa_engine.core.types import DiskCounts, StoredCheckpoint

Content = Any  # of a page or a slot


@dataclass
class Contents:
    """What a source of blocks has."""

    blocks: dict[tuple[int, bytes], Content] = field(default_factory=dict)  # by table and hash
    checkpoints: dict[bytes, tuple[StoredCheckpoint, Content]] = field(default_factory=dict)

    def update(self, other: "Contents") -> None:
        self.blocks |= other.blocks
        self.checkpoints |= other.checkpoints

    def has_tails(self, stored: StoredCheckpoint) -> bool:
        return all(
            (table, of_tail) in self.blocks for table, tail in enumerate(stored.tails, start=1) for _, of_tail in tail
        )


class FakeDisk:
    """It outlives the core that uses it."""

    def __init__(self) -> None:
        self.contents = Contents()
        self.num_written = 0
        self._waiting: list[tuple[Sequence[bytes], bytes, int]] = []
        self._blocks, self._checkpoints = KvChanges(), KvChanges()

    def open(self) -> None:
        """Report everything next, as a mover that starts."""
        self._waiting = []
        self._blocks = KvChanges.snapshot(block_hash for table, block_hash in self.contents.blocks if table == 0)
        self._checkpoints = KvChanges.snapshot(self.contents.checkpoints)

    def write(self, blocks: Sequence[bytes], checkpoint: bytes, copied: int) -> None:
        assert blocks or checkpoint
        assert len(set(blocks)) == len(blocks)
        self._waiting.append((blocks, checkpoint, copied))

    def reset(self) -> None:
        self.contents = Contents()
        self.open()

    def advance(self, host: Contents, copied: int, rng: random.Random, *, to_end: bool) -> None:
        """Write some of what waits, from what host memory has had, and delete something."""
        for waiting in list(self._waiting):
            blocks, checkpoint, serial = waiting
            if copied < serial or not (to_end or rng.random() < 0.3):
                continue
            self._waiting.remove(waiting)
            if rng.random() < 0.2:
                blocks, checkpoint = blocks[: rng.randint(0, len(blocks))], b""
            for block_hash in blocks:
                if (0, block_hash) in host.blocks:
                    self._put((0, block_hash), host.blocks[0, block_hash])
            if checkpoint in host.checkpoints and host.has_tails(host.checkpoints[checkpoint][0]):
                self._put_checkpoint(host, checkpoint)
        if self.contents.blocks and rng.random() < 0.02:
            self.remove(rng.choice(list(self.contents.blocks)))

    def remove(self, key: tuple[int, bytes]) -> None:
        """Delete a unit, and the checkpoints that have it in a tail."""
        del self.contents.blocks[key]
        if key[0] == 0:
            self._blocks.remove(key[1])
        for block_hash, (stored, _) in list(self.contents.checkpoints.items()):
            if not self.contents.has_tails(stored):
                del self.contents.checkpoints[block_hash]
                self._checkpoints.remove(block_hash)

    def take_changes(self) -> DiskChanges | None:
        blocks, checkpoints = self._blocks, self._checkpoints
        if not blocks and not checkpoints:
            return None
        self._blocks, self._checkpoints = KvChanges(), KvChanges()
        counts = DiskCounts(num_bytes=len(self.contents.blocks), num_written_bytes=self.num_written)
        return DiskChanges(blocks=blocks, checkpoints=checkpoints, counts=counts)

    def _put(self, key: tuple[int, bytes], content: Content) -> None:
        if key not in self.contents.blocks:
            self.num_written += 1
            if key[0] == 0:
                self._blocks.store(key[1])
        self.contents.blocks[key] = content

    def _put_checkpoint(self, host: Contents, block_hash: bytes) -> None:
        stored, state = host.checkpoints[block_hash]
        for table, tail in enumerate(stored.tails, start=1):
            for _, of_tail in tail:
                self._put((table, of_tail), host.blocks[table, of_tail])
        if block_hash not in self.contents.checkpoints:
            self._checkpoints.store(block_hash)
        self.contents.checkpoints[block_hash] = stored, state
