"""Index: which units of the arena may be served to other engines, by what they hold."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Condition
from typing import NamedTuple

from proa_engine.core.kv.mover import Fetched, FetchJob
from proa_engine.core.types import NO_STATE, StoredCheckpoint
from proa_engine.mover.arena import Arena
from proa_engine.mover.directory import Directory, DirectoryEntry, NoDirectory

_CHECK_SECONDS = 0.5  # from one call of `is_wanted` to the next
STATE = -1  # instead of a table: the state of a checkpoint

Key = tuple[int, bytes]  # table, or `STATE`, and hash


@dataclass(slots=True)
class Filled:
    """What a job has filled so far."""

    num_blocks: int = 0
    num_bytes: int = 0
    units: list[tuple[Key, int, int]] = field(default_factory=list)  # what each holds, its number and checksum
    checkpoint: StoredCheckpoint | None = None

    def end(self, job_id: int, error: str) -> Fetched:
        """Return the end of the job, when nothing is written any more. `error`: why it ended early; empty if it did
        not."""
        return Fetched(
            job_id=job_id,
            num_blocks=self.num_blocks,
            checkpoint=b"" if self.checkpoint is None else self.checkpoint.block_hash,
            num_bytes=self.num_bytes,
            is_done=True,
            error=error,
        )


class Entry(NamedTuple):
    """A unit that may be served while its serial is this one."""

    unit: int
    serial: int
    checksum: int


class Index:
    """Settled blocks and checkpoints, which are also written to `directory`. Thread-safe.

    A unit is settled when the copies that wrote it are complete: then its checksum is computed. It holds what the
    checksum says until its serial changes. Whoever reads it during that change notices by the checksum.
    """

    def __init__(
        self, arena: Arena, since: float, copied: int = 0, directory: Directory | NoDirectory | None = None
    ) -> None:
        self._arena = arena
        self._directory = directory or NoDirectory()
        self._since = since  # Unix seconds; everything was stored after it
        self._num_resets = 0
        self._forgotten = copied  # serial of the last copies before the start or the last reset
        self._entries: dict[Key, Entry] = {}
        self._keys: dict[int, Key] = {}  # by unit
        self._checkpoints: dict[bytes, StoredCheckpoint] = {}
        self._copied = copied
        self._changed = Condition()

    @property
    def since(self) -> float:
        """No unit was stored before this time, in Unix seconds."""
        return self._since

    @property
    def num_resets(self) -> int:
        return self._num_resets

    def settle(
        self, serial: int, blocks: Iterable[tuple[int, bytes]] = (), checkpoints: Iterable[StoredCheckpoint] = ()
    ) -> None:
        """Add what copies have stored. All copies up to `serial` are complete."""
        now = time.time()
        for page, block_hash in blocks:
            self._add((0, block_hash), page, serial, now)
        for stored in checkpoints:
            for table, tail in enumerate(stored.tails, start=1):
                for page, block_hash in tail:
                    self._add((table, block_hash), page, serial, now)
            if stored.state != NO_STATE:
                self._add((STATE, stored.block_hash), self._arena.unit_of_slot(stored.state), serial, now)
        with self._changed:
            for stored in checkpoints:
                self._put_checkpoint(stored)
            self._copied = serial
            self._changed.notify_all()

    def add_received(
        self, units: Iterable[tuple[Key, int, int]], checkpoint: StoredCheckpoint | None, num_resets: int
    ) -> None:
        """Add units that a job has filled: what they hold, their numbers and checksums. `num_resets`: when it began."""
        now = time.time()
        with self._changed:
            if num_resets != self._num_resets:
                return
            for key, unit, checksum in units:
                self._store(key, Entry(unit, self._arena.serial(unit), checksum), now)
            if checkpoint is not None:
                self._put_checkpoint(checkpoint)
            self._changed.notify_all()

    def add_adopted(
        self, units: Iterable[tuple[Key, int, int]], checkpoints: Iterable[StoredCheckpoint], num_resets: int
    ) -> bool:
        """Add what the directory has of an earlier engine, as `add_received` does. Returns False after a reset."""
        with self._changed:
            if num_resets != self._num_resets:
                return False
            for key, unit, checksum in units:
                self._put(key, Entry(unit, self._arena.serial(unit), checksum))
            self._checkpoints.update((stored.block_hash, stored) for stored in checkpoints)
            self._changed.notify_all()
            return True

    def clear_for(self, job: FetchJob) -> bool:
        """Remove the units that a job fills, when no copies use them any more. Returns False if that takes longer than
        `job.wait_ms`."""
        if not self.wait_for_copies(job.copied, job.wait_ms / 1000):
            return False
        units = [*job.pages, *(page for tail in job.tails for page in tail)]
        if job.state != NO_STATE:
            units.append(self._arena.unit_of_slot(job.state))
        with self._changed:
            for unit in units:
                self._remove(unit)
        return True

    def reset(self, since: float, serial: int) -> None:
        """Remove everything, and ignore what copies up to `serial` store, also if they are not complete."""
        with self._changed:
            self._since, self._forgotten = max(since, self._since), serial
            self._num_resets += 1
            self._directory.epoch += 1  # as the worker has done in the header
            self._entries, self._keys, self._checkpoints = {}, {}, {}

    def find(self, key: Key) -> Entry | None:
        """Return the unit that holds what the key says, None if there is none any more."""
        with self._changed:
            return self._find(key)

    def wait_for_copies(self, serial: int, timeout: float) -> bool:
        """Wait until all copies up to `serial` are complete. Returns False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._copied >= serial, timeout)

    def blocks(self, chain: Sequence[bytes], timeout: float, is_wanted: Callable[[], bool]) -> list[Entry]:
        """Return the leading blocks of table 0 that can be served. If there is none, wait for one: `timeout` seconds at
        most, or until `is_wanted`, which is called twice a second, returns False."""
        with self._changed:
            self._wait(lambda: not chain or self._find((0, chain[0])) is not None, timeout, is_wanted)
            found: list[Entry] = []
            for block_hash in chain:
                entry = self._find((0, block_hash))
                if entry is None:
                    break
                found.append(entry)
            return found

    def checkpoint(
        self, chain: Sequence[bytes], timeout: float, is_wanted: Callable[[], bool]
    ) -> tuple[StoredCheckpoint, list[tuple[Key, Entry]]] | None:
        """Return the last checkpoint in the chain that can be served as a whole, and its units.

        Waits for one at the chain's end as `blocks` does.
        """
        with self._changed:
            self._wait(lambda: not chain or self._whole(chain[-1]) is not None, timeout, is_wanted)
            for block_hash in reversed(chain):
                if (units := self._whole(block_hash)) is not None:
                    return self._checkpoints[block_hash], units
            return None

    def _wait(self, is_there: Callable[[], bool], timeout: float, is_wanted: Callable[[], bool]) -> None:
        """Wait for changes of the index until something is there, `timeout` seconds have passed, or it is not wanted
        any more."""
        deadline = time.monotonic() + timeout
        while not is_there() and (left := deadline - time.monotonic()) > 0 and is_wanted():
            self._changed.wait(min(left, _CHECK_SECONDS))

    def _whole(self, block_hash: bytes) -> list[tuple[Key, Entry]] | None:
        """Return all units of a checkpoint; None if it is not stored or one of them was overwritten."""
        stored = self._checkpoints.get(block_hash)
        if stored is None:
            return None
        keys = [(table, of_tail) for table, tail in enumerate(stored.tails, start=1) for _, of_tail in tail]
        if stored.state != NO_STATE:
            keys.append((STATE, block_hash))
        units = [(key, entry) for key in keys if (entry := self._find(key)) is not None]
        if len(units) == len(keys):
            return units
        self._checkpoints.pop(block_hash, None)
        return None

    def _find(self, key: Key) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None or self._arena.serial(entry.unit) == entry.serial:
            return entry
        self._remove(entry.unit)
        return None

    def _add(self, key: Key, unit: int, completed: int, now: float) -> None:
        """Add a unit, unless later copies than those that are complete write it, or it was written before a reset."""
        serial = self._arena.serial(unit)
        with self._changed:
            known = self._find(key)
        if not self._forgotten < serial <= completed or (known is not None and known.unit == unit):
            return
        checksum = self._arena.checksum(unit)
        if self._arena.serial(unit) == serial:
            with self._changed:
                self._store(key, Entry(unit, serial, checksum), now)

    def _store(self, key: Key, entry: Entry, stored: float) -> None:
        """Add an entry, which the directory does not have. `stored`: when, in Unix seconds."""
        self._directory.write(entry.unit, DirectoryEntry(key, entry.checksum, stored))
        self._put(key, entry)

    def _put(self, key: Key, entry: Entry) -> None:
        if self._keys.get(entry.unit) != key:
            self._remove(entry.unit)
        self._entries[key] = entry
        self._keys[entry.unit] = key

    def _remove(self, unit: int) -> None:
        """Remove a unit, and the checkpoint whose state or last block it has."""
        if unit not in self._keys:
            return
        key = self._keys.pop(unit)
        if key not in self._entries or self._entries[key].unit != unit:
            return
        del self._entries[key]
        table, block_hash = key
        if table != 0:
            self._checkpoints.pop(block_hash, None)

    def _put_checkpoint(self, checkpoint: StoredCheckpoint) -> None:
        """Add a checkpoint, whose units are added."""
        self._checkpoints[checkpoint.block_hash] = checkpoint
        self._directory.write_checkpoint(checkpoint)
