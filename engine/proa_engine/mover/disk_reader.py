"""DiskReader: runs jobs that fill pages of the arena with units on disk.

Units are read into memory of their own, verified, and then copied: so a job can be ended while a read hangs, as on a
network file system, and nothing is written to its pages afterwards.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from threading import Lock, Thread

from proa_engine.core.kv.mover import Fetched, FetchJob
from proa_engine.core.types import StoredCheckpoint
from proa_engine.mover.arena import Arena
from proa_engine.mover.deadline import Deadline
from proa_engine.mover.disk import Disk
from proa_engine.mover.disk_index import Place
from proa_engine.mover.disk_records import CheckpointRecord
from proa_engine.mover.disk_segments import Damaged, Segments
from proa_engine.mover.index import Filled, Index, Key

_NUM_THREADS = 4  # reads at the same time, of all jobs
_NUM_AHEAD = 8  # units of a job that are read or wait to be copied
_PAUSE_SECONDS = 60.0  # without reading, after a read that hung


class _Ended(Exception):
    """The job ends early, for this reason."""


class DiskReader:
    """Runs jobs, each on a thread of its own. `on_end` is called once for each, when nothing is written any more."""

    def __init__(
        self,
        disk: Disk,
        arena: Arena,
        index: Index,
        on_end: Callable[[Fetched], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._arena = arena
        self._index = index
        self._on_end = on_end
        self._clock = clock
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="proa-mover-read")
        self._lock = Lock()
        self._running: set[int] = set()  # ids of jobs that are not cancelled
        self._answered = 0.0  # when a read last ended
        self._reads_at = 0.0  # when reading may go on after a read that hung

    def fetch(self, job: FetchJob) -> bool:
        """Start a job. Returns False if its units are not on disk but in other engines."""
        if job.addresses:
            return False
        with self._lock:
            self._running.add(job.job_id)
        arguments = (job, self._index.num_resets)
        Thread(target=self._run, args=arguments, name=f"proa-mover-disk-{job.job_id}", daemon=True).start()
        return True

    def cancel(self, job_id: int) -> None:
        """End a job soon, if it has not ended."""
        with self._lock:
            self._running.discard(job_id)

    def _run(self, job: FetchJob, num_resets: int) -> None:
        filled, error, segments = Filled(), "", self._disk.segments
        deadline = Deadline(job.max_ms / 1000, clock=self._clock)
        try:
            if segments is None:
                raise _Ended("the disk is not read yet")
            if self._clock() < self._reads_at:
                raise _Ended("the disk did not answer a short time ago")
            if not self._index.clear_for(job):
                raise _Ended("copies of earlier steps did not end in time")
            self._fill(segments, job, filled, deadline)
        except (_Ended, OSError) as problem:
            error = str(problem)
        except Damaged as problem:
            error = str(problem)
            self._disk.count(num_damaged=1)
        except Exception as problem:  # a job that does not end would keep its requests waiting
            error = f"{type(problem).__name__}: {problem}"
        self._index.add_received(filled.units, filled.checkpoint, num_resets)
        self.cancel(job.job_id)
        self._disk.count(num_read_bytes=filled.num_bytes)
        if segments is not None:
            self._disk.report()
        self._on_end(filled.end(job.job_id, error))

    def _fill(self, segments: Segments, job: FetchJob, filled: Filled, deadline: Deadline) -> None:
        """Fill the job's pages, in order, up to the first block that is not on disk; then those of a checkpoint.

        Raises `Damaged`, `OSError` or `_Ended`; what is whole is in `filled`.
        """
        blocks = [(0, block_hash) for block_hash in job.chain[job.num_held :]]
        with closing(self._read(segments, blocks, job.wait_ms / 1000, deadline)) as contents:
            for page, content in zip(job.pages, contents, strict=False):
                self._put(page, content, job, filled)
                filled.num_blocks += 1
        chain = job.chain[: job.num_held + filled.num_blocks]
        candidates = map(segments.find_checkpoint, reversed(chain if job.needs_checkpoint else ()))
        checkpoint = next((found for found in candidates if found is not None), None)
        if checkpoint is None:
            return
        tails = _tails(checkpoint.record, job)
        units = [page for tail in tails for page, _ in tail]
        if checkpoint.record.has_state:
            units.append(self._arena.unit_of_slot(job.state))
        with closing(self._read(segments, checkpoint.keys, job.wait_ms / 1000, deadline)) as contents:
            num_before = len(filled.units)
            for unit, content in zip(units, contents, strict=False):
                self._put(unit, content, job, filled)
        if len(filled.units) - num_before == len(units):  # otherwise a segment was deleted meanwhile
            filled.checkpoint = StoredCheckpoint(checkpoint.record.block_hash, tails, job.state)

    def _read(
        self, segments: Segments, keys: Iterable[Key], seconds: float, deadline: Deadline
    ) -> Generator[tuple[Key, Place, memoryview]]:
        """Yield the units with their places, in order, up to the first one that is not there, reading some ahead.

        Raises `_Ended` if one takes more than `seconds`, or all more than the deadline.
        """
        reads: deque[tuple[Key, Place, Future[memoryview]]] = deque()
        remaining = iter(keys)
        try:
            while True:
                for key in islice(remaining, _NUM_AHEAD - len(reads)):
                    place = segments.find(key)
                    if place is None:
                        remaining = iter(())
                        break
                    reads.append((key, place, self._threads.submit(self._read_unit, segments, key, place)))
                if not reads:
                    return
                key, place, content = reads.popleft()
                limit = 0.0
                try:
                    limit = min(seconds, deadline.left())
                    yield key, place, content.result(limit)
                except FileNotFoundError:  # the segment was deleted
                    return
                except TimeoutError:
                    now = self._clock()
                    # Otherwise the job's own time is over, or the reads of other jobs took that time.
                    if limit == seconds and now - self._answered >= seconds:
                        self._reads_at = now + _PAUSE_SECONDS
                    raise _Ended("the disk did not answer in time") from None
        finally:
            for _, _, content in reads:
                content.cancel()

    def _read_unit(self, segments: Segments, key: Key, place: Place) -> memoryview:
        try:
            return segments.read(key, place)
        finally:
            self._answered = self._clock()

    def _put(self, unit: int, read: tuple[Key, Place, memoryview], job: FetchJob, filled: Filled) -> None:
        """Copy a unit that was read into the arena."""
        key, place, content = read
        buffers = self._arena.buffers(unit)
        if sum(map(len, buffers)) != len(content):
            raise _Ended(f"a unit of {len(content)} bytes does not fit this engine's cache")
        if job.job_id not in self._running:
            raise _Ended("the request was aborted")
        start = 0
        for buffer in buffers:
            buffer[:] = content[start : start + len(buffer)]
            start += len(buffer)
        filled.units.append((key, unit, place.checksum))
        filled.num_bytes += len(content)


class NoDiskReader:
    """The `DiskReader` of a mover without a disk."""

    def fetch(self, job: FetchJob) -> bool:
        return False

    def cancel(self, job_id: int) -> None:
        pass


def _tails(record: CheckpointRecord, job: FetchJob) -> list[list[tuple[int, bytes]]]:
    """Return the pages for a checkpoint's tails, in order, with their hashes. A job's tails begin with the last one."""
    return [
        [(page, block_hash) for page, block_hash in zip(pages[: len(tail)][::-1], tail, strict=True)]
        for pages, tail in zip(job.tails, record.tails, strict=True)
    ]
