"""Disk: writes units of the arena to segments, on a thread of its own, and reports what the segments have.

Nothing waits for it: what cannot be written in time is skipped and counted. While the disk is full or fails, nothing is
written for a minute, and reads go on.
"""

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Lock, Thread

from proa_engine.core.kv.mover import DiskChanges
from proa_engine.core.types import NO_STATE, DiskCounts
from proa_engine.mover.arena import Arena
from proa_engine.mover.disk_records import CheckpointRecord
from proa_engine.mover.disk_segments import Segments, Write
from proa_engine.mover.disk_slots import lock_folder
from proa_engine.mover.index import Entry, Index, Key
from proa_engine.mover.messages import DiskSettings, WriteBlocks
from proa_engine.mover.throttle import Throttle

SEGMENT_BYTES = 64 << 20
MIN_SEGMENTS = 8  # smaller ones if there is less room
_PAUSE_SECONDS = 60.0  # without writing, after an error
_QUEUE_SECONDS = 10.0  # of writing that may wait
_REPORT_SECONDS = 0.2  # between reports, unless nothing waits
_COPIES_SECONDS = 2.0  # for the copies that have stored what is written
_LOCK_SECONDS = 0.2  # between attempts to lock the folder
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """What tests replace."""

    write: Write = os.pwritev
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Disk:
    """`report` is called, from any thread, with each change of what is found. `log` is called with lines about errors.

    `segments` is None until the folder is locked and read.
    """

    def __init__(
        self,
        settings: DiskSettings,
        arena: Arena,
        index: Index,
        report: Callable[[DiskChanges], None],
        log: Callable[[str], None],
        hooks: Hooks = Hooks(),
    ) -> None:
        self.segments: Segments | None = None
        self._settings = settings
        self._arena = arena
        self._index = index
        self._report = report
        self._log = log
        self._hooks = hooks
        self._throttle = Throttle(settings.bytes_per_second, clock=hooks.clock, sleep=hooks.sleep)
        self._max_waiting = max(int(settings.bytes_per_second * _QUEUE_SECONDS / arena.layout.page_bytes), 256)
        self._thread = Thread(target=self._run, name="proa-mover-disk", daemon=True)
        self._lock: int | None = None  # of the folder
        self._changed = Condition()  # of the next four
        self._is_closed = False
        self._waiting: deque[WriteBlocks] = deque()
        self._queued: set[bytes] = set()  # blocks of these messages and of the one that is written
        self._must_clear = False
        self._counting = Lock()
        self._counts = DiskCounts(max_bytes=settings.num_bytes)
        self._reporting = Lock()  # so that reports are in order
        self._reported = 0.0
        self._writes_at = 0.0  # when writing may go on after an error
        self._has_failed = False  # at the last attempt to write

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write nothing more, and release the folder when the unit that is written is done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        if self._lock is not None and not self._thread.is_alive():
            os.close(self._lock)

    def write(self, message: WriteBlocks) -> None:
        """Queue blocks that are not queued yet, or as many as may wait, and the checkpoint behind them."""
        with self._changed:
            blocks = [block_hash for block_hash in message.blocks if block_hash not in self._queued]
            room = self._max_waiting - max(len(self._queued), len(self._waiting))
            checkpoint = message.checkpoint
            if room < max(len(blocks), 1):  # a message may have a checkpoint alone
                self.count(num_skipped=len(blocks) - room + bool(checkpoint))
                blocks, checkpoint = blocks[:room], b""
            if blocks or checkpoint:
                self._queued.update(blocks)
                self._waiting.append(WriteBlocks(tuple(blocks), checkpoint, message.copied))
                self._changed.notify()

    def reset(self) -> None:
        """Forget and delete everything, as after a change of weights."""
        with self._changed:
            self._waiting.clear()
            self._queued.clear()
            self._must_clear = True
            if self.segments is not None:
                self.segments.reset()
            self._changed.notify()

    def count(self, **added: int) -> None:
        """Add to counts, by their names."""
        with self._counting:
            self._counts = replace(
                self._counts, **{name: getattr(self._counts, name) + number for name, number in added.items()}
            )

    def report(self) -> None:
        """Report what has changed since the last report."""
        assert self.segments is not None
        with self._reporting:
            blocks, checkpoints = self.segments.take_changes()
            counts = replace(self._counts, num_bytes=self.segments.num_bytes)
            self._report(DiskChanges(blocks=blocks, checkpoints=checkpoints, counts=counts))
        self._reported = self._hooks.clock()

    def _run(self) -> None:
        segments = None
        while segments is None:
            if self._is_closed:
                return
            segments = self._open()
        with self._changed:
            if self._must_clear:
                segments.reset()
            self.segments = segments
        self.report()
        while not self._is_closed:
            self._write_waiting(segments)
            if not self._waiting or self._is_report_due:
                self.report()
        segments.close()

    @property
    def _is_report_due(self) -> bool:
        return self._hooks.clock() - self._reported >= _REPORT_SECONDS

    def _open(self) -> Segments | None:
        """Lock and read the folder. None: to be tried again. The mover of an engine that has just ended may have it."""
        folder = Path(self._settings.folder)
        try:
            if self._lock is None:
                self._lock = lock_folder(folder)
            if self._lock is None:
                self._hooks.sleep(_LOCK_SECONDS)
                return None
            num_bytes = self._settings.num_bytes
            segment_bytes = min(SEGMENT_BYTES, num_bytes // MIN_SEGMENTS)
            return Segments(
                folder,
                max_bytes=num_bytes,
                segment_bytes=segment_bytes,
                adopts=self._settings.adopts,
                write=self._hooks.write,
            )
        except OSError as error:
            self._log(f"kv_disk_path: {folder} cannot be read: {error.strerror or error}; trying again every minute")
            self.count(num_errors=1)
            self._hooks.sleep(_PAUSE_SECONDS)
            return None

    def _write_waiting(self, segments: Segments) -> None:
        """Wait for a message or a reset, and do what it says."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._must_clear or self._is_closed)
            if self._is_closed:
                return
            must_clear, self._must_clear = self._must_clear, False
            messages = [] if must_clear else [self._waiting.popleft()]
        try:
            if must_clear:
                segments.clear()
            for message in messages:
                self._write(segments, message)
        except OSError as error:
            self._fail(segments, error)
            if must_clear:  # nothing may be written before that
                self._must_clear = True
                self._hooks.sleep(_PAUSE_SECONDS)
        with self._changed:
            for message in messages:
                self._queued.difference_update(message.blocks)

    def _write(self, segments: Segments, message: WriteBlocks) -> None:
        """Write what is not there yet, in order, up to what host memory does not have any more. Raises `OSError`."""
        num_done, total = 0, len(message.blocks) + bool(message.checkpoint)
        try:
            is_paused = self._hooks.clock() < self._writes_at
            if is_paused or not self._index.wait_for_copies(message.copied, _COPIES_SECONDS):
                return
            for block_hash in message.blocks:
                if self._is_closed or not self._write_block(segments, (0, block_hash)):
                    return
                num_done += 1
                if self._is_report_due:
                    self.report()
            if message.checkpoint:
                num_done += self._write_checkpoint(segments, message.checkpoint)
        finally:
            if num_done < total:
                self.count(num_skipped=total - num_done)

    def _write_block(self, segments: Segments, key: Key) -> bool:
        if segments.find(key) is not None:
            return True
        entry = self._index.find(key)
        return entry is not None and self._write_unit(segments, key, entry)

    def _write_checkpoint(self, segments: Segments, block_hash: bytes) -> bool:
        if segments.find_checkpoint(block_hash) is not None:
            return True
        found = self._index.checkpoint([block_hash], 0.0, lambda: False)
        if found is None:
            return False
        stored, units = found
        for key, entry in units:
            if segments.find(key) is None and not self._write_unit(segments, key, entry):
                return False
        tails = tuple(tuple(of_tail for _, of_tail in tail) for tail in stored.tails)
        return segments.add_checkpoint(CheckpointRecord(block_hash, tails, stored.state != NO_STATE))

    def _write_unit(self, segments: Segments, key: Key, entry: Entry) -> bool:
        """Write a unit straight from the arena. Returns False if it changed meanwhile."""
        buffers = self._arena.buffers(entry.unit)
        length = sum(map(len, buffers))
        self._make_room(segments, length)
        self._throttle.wait(length)
        place = segments.append(buffers, entry.checksum)
        self.count(num_written_bytes=length)
        if self._index.find(key) != entry:
            return False
        segments.add(key, place)
        self._has_failed = False
        return True

    def _make_room(self, segments: Segments, length: int) -> None:
        """Before a new segment is begun, delete the oldest one if there are too many bytes."""
        while segments.is_at_end(length) and segments.must_make_room:
            kept = segments.make_room()
            for key, content, checksum in kept.units:
                self._throttle.wait(len(content))
                segments.add(key, segments.append([content], checksum))
            for record in kept.checkpoints:
                segments.add_checkpoint(record)

    def _fail(self, segments: Segments, error: OSError) -> None:
        """Stop writing for a while. If the volume is full, make room for when it goes on."""
        if not self._has_failed:
            reason = error.strerror or error
            self._log(f"kv_disk_path: {self._settings.folder} cannot be written: {reason}; trying again every minute")
        self._has_failed = True
        self._writes_at = self._hooks.clock() + _PAUSE_SECONDS
        self.count(num_errors=1)
        if error.errno == errno.ENOSPC:
            with suppress(OSError):
                segments.delete_oldest()


class NoDisk:
    """The `Disk` of a mover without one."""

    def start(self) -> None:
        pass

    def write(self, message: WriteBlocks) -> None:
        raise AssertionError("the core writes to a disk only if there is one")

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass
