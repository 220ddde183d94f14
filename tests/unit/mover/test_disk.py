"""A mover with a disk: what it writes and reads, across restarts, and when the disk is full, damaged or hangs."""

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from proa_engine.core.kv.mover import DiskChanges
from proa_engine.core.types import DiskCounts
from proa_engine.mover.arena import Arena
from proa_engine.mover.disk import Disk, Hooks
from proa_engine.mover.disk_segments import Segments
from proa_engine.mover.disk_slots import lock_folder
from proa_engine.mover.index import Index
from proa_engine.mover.messages import DiskSettings, WriteBlocks
from support.movers import LAYOUT, RunningMover, hashes, make_job, repeated, running_mover

PAGE = LAYOUT.page_bytes
CHAIN = hashes(6)


def settings(folder: Path, *, num_pages: int = 100, pages_per_second: float = 1e6) -> DiskSettings:
    return DiskSettings(str(folder), num_pages * PAGE, pages_per_second * PAGE)


def has(*block_hashes: bytes) -> Callable[[RunningMover], bool]:
    return lambda mover: mover.on_disk == set(block_hashes)


def written(mover: RunningMover, chain: Sequence[bytes]) -> None:
    """Store blocks, and wait until they are on disk."""
    mover.store(chain)
    mover.write_to_disk(chain)
    mover.wait_for_disk(lambda mover: mover.on_disk >= set(chain))


def read_chain(
    mover: RunningMover, chain: Sequence[bytes], *, first_page: int = 10, job_id: int = 1
) -> tuple[int, str]:
    """How many blocks are read from disk, and the error. All that are read have the right content."""
    mover.fetch(make_job("", chain, first_page=first_page, job_id=job_id, num_ranks=0))
    fetched = mover.fetched()
    for page, block_hash in enumerate(chain[: fetched.num_blocks], start=first_page):
        assert mover.content(page) == repeated(block_hash)
    assert fetched.num_bytes == fetched.num_blocks * PAGE
    return fetched.num_blocks, fetched.error


def damage(folder: Path, page: int) -> None:
    """Flip a bit of a page of the first segment."""
    path = folder / "00000000.data"
    data = bytearray(path.read_bytes())
    data[page * PAGE + 3] ^= 4
    path.write_bytes(data)


def test_blocks_are_read_that_were_written_and_by_a_later_mover(tmp_path: Path) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        mover.wait_for_disk(has())
        written(mover, CHAIN)
        assert read_chain(mover, CHAIN) == (6, "")
        assert mover.counts.num_written_bytes == 6 * PAGE
    with running_mover(disk=settings(tmp_path)) as later:
        later.wait_for_disk(has(*CHAIN))
        assert read_chain(later, [*CHAIN, b"x" * 16]) == (6, "")
        assert later.counts.num_read_bytes == 6 * PAGE
        assert later.counts.num_bytes > 6 * PAGE


def test_blocks_that_were_read_are_served_to_other_engines(tmp_path: Path) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        written(mover, CHAIN)
    with running_mover(disk=settings(tmp_path)) as mover, running_mover() as peer:
        mover.wait_for_disk(has(*CHAIN))
        assert read_chain(mover, CHAIN) == (6, "")
        peer.fetch(make_job(mover, CHAIN))
        assert peer.fetched().num_blocks == 6


def test_a_block_is_written_once(tmp_path: Path) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        written(mover, CHAIN[:4])
        for _ in range(3):
            mover.write_to_disk(CHAIN[:4])
        written(mover, CHAIN)
        assert mover.counts.num_written_bytes == 6 * PAGE
        assert mover.counts.num_skipped == 0


def test_blocks_that_host_memory_has_no_longer_are_skipped(tmp_path: Path) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        mover.store(CHAIN[:3])
        mover.begin_store(1)  # the second page gets another content
        mover.write_to_disk(CHAIN[:3])
        mover.end_store()
        mover.wait_for_disk(has(CHAIN[0]))
        assert mover.counts.num_skipped == 2
    with running_mover(disk=settings(tmp_path)) as later:
        later.wait_for_disk(has(CHAIN[0]))


def test_blocks_are_written_when_the_copies_that_store_them_are_complete(tmp_path: Path) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        mover.begin_store(0)
        mover.write(0, b"what the page had before")
        mover.write_to_disk(CHAIN[:1])
        time.sleep(0.05)
        mover.write(0, CHAIN[0])
        mover.end_store([(0, CHAIN[0])])
        mover.wait_for_disk(has(CHAIN[0]))
        assert read_chain(mover, CHAIN[:1]) == (1, "")


@pytest.mark.parametrize("page", range(3))
def test_a_damaged_block_ends_the_chain_before_it(tmp_path: Path, page: int) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        written(mover, CHAIN[:3])
        damage(tmp_path, page)
        assert read_chain(mover, CHAIN[:3]) == (page, "a unit's checksum is wrong")
        assert mover.on_disk == {*CHAIN[:3]} - {CHAIN[page]}
        assert mover.counts.num_damaged == 1
        mover.write_to_disk(CHAIN[:3])
        mover.wait_for_disk(has(*CHAIN[:3]))
        assert read_chain(mover, CHAIN[:3], job_id=2) == (3, "")


def test_a_checkpoint_is_read_with_its_tails_and_its_state(tmp_path: Path) -> None:
    chain = hashes(5)
    with running_mover(disk=settings(tmp_path)) as mover:
        mover.store_checkpoint(chain)
        mover.write_to_disk(chain, chain[-1])
        mover.wait_for_disk(lambda mover: mover.checkpoints_on_disk == {chain[-1]})
        source = [mover.content(unit) for unit in (10, 11, 12, LAYOUT.num_pages + 1)]
    with running_mover(disk=settings(tmp_path)) as later:
        later.wait_for_disk(lambda mover: mover.checkpoints_on_disk == {chain[-1]})
        job = make_job("", chain, num_ranks=0, tails=((15, 14), (16,)), state=2, needs_checkpoint=True)
        later.fetch(job)
        fetched = later.fetched()
        assert (fetched.num_blocks, fetched.checkpoint, fetched.error) == (5, chain[-1], "")
        assert [later.content(unit) for unit in (14, 15, 16, LAYOUT.num_pages + 2)] == source


def test_a_checkpoint_with_a_damaged_state_is_not_read(tmp_path: Path) -> None:
    chain = hashes(5)
    with running_mover(disk=settings(tmp_path)) as mover:
        mover.store_checkpoint(chain)
        mover.write_to_disk(chain, chain[-1])
        mover.wait_for_disk(lambda mover: mover.checkpoints_on_disk == {chain[-1]})
        damage(tmp_path, 8)
        job = make_job("", chain, num_ranks=0, tails=((15, 14), (16,)), state=2, needs_checkpoint=True)
        mover.fetch(job)
        fetched = mover.fetched()
        assert (fetched.num_blocks, fetched.checkpoint) == (5, b"")
        assert fetched.error
        assert mover.checkpoints_on_disk == set()


def test_a_job_that_is_cancelled_is_answered(tmp_path: Path) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        written(mover, CHAIN[:2])
        mover.begin_store(10)  # the job waits for these copies
        mover.fetch(make_job("", CHAIN[:2], first_page=10, num_ranks=0, copied=mover.serial, wait_ms=20_000))
        mover.cancel(1)
        mover.end_store()
        fetched = mover.fetched()
        assert (fetched.num_blocks, fetched.error) == (0, "the request was aborted")


def test_nothing_is_read_after_a_reset(tmp_path: Path) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        written(mover, CHAIN)
        mover.reset(since=200.0)
        assert read_chain(mover, CHAIN) == (0, "")
        mover.wait_for_disk(has())
        other = hashes(2, salt=7)
        written(mover, other)
        assert read_chain(mover, other, job_id=2) == (2, ""), "of the new weights"
    with running_mover(disk=settings(tmp_path)) as later:
        later.wait_for_disk(lambda mover: mover.counts.max_bytes > 0)
        assert later.on_disk == set(), "the folder's name tells the old weights"


def test_a_mover_that_is_restarted_after_a_reset_adopts_nothing(tmp_path: Path) -> None:
    disk = settings(tmp_path)
    with running_mover(disk=disk) as mover:
        written(mover, CHAIN)
    for _ in range(2):
        with running_mover(
            disk=DiskSettings(disk.folder, disk.num_bytes, disk.bytes_per_second, adopts=False)
        ) as mover:
            mover.wait_for_disk(lambda mover: mover.counts.max_bytes > 0)
            assert mover.on_disk == set()
            written(mover, CHAIN)


def test_a_mover_waits_for_the_folder_while_another_has_it(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    assert lock is not None
    with running_mover(disk=settings(tmp_path)) as mover:
        assert read_chain(mover, CHAIN) == (0, "the disk is not read yet")
        os.close(lock)
        written(mover, CHAIN[:1])


def test_a_folder_that_cannot_be_read_is_logged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with running_mover(disk=settings(tmp_path / "file" / "rank-0")) as mover:
        mover.wait_for_disk(lambda mover: bool(mover.lines))
        assert "kv_disk_path" in mover.lines[0]
        assert read_chain(mover, CHAIN) == (0, "the disk is not read yet")


class Bench:
    """A disk over an arena in which all pages are settled, with a clock and a volume of the test."""

    def __init__(self, folder: Path, *, num_pages: int = 100, pages_per_second: float = 1e6) -> None:
        self.now = 1000.0
        self.error: OSError | None = None  # of the next writes
        self.reports: list[DiskChanges] = []
        self.on_disk: set[bytes] = set()
        self.lines: list[str] = []
        self._descriptor = os.memfd_create("proa-test-arena")
        os.ftruncate(self._descriptor, LAYOUT.num_bytes)
        self.arena = Arena(self._descriptor, LAYOUT)
        self.index = Index(self.arena, since=0.0)
        for page, block_hash in enumerate(CHAIN):
            self.arena._serials[page] = 1
            self.arena.buffers(page)[0][:] = repeated(block_hash)
        self.index.settle(1, list(enumerate(CHAIN)))
        self.disk = Disk(
            settings(folder, num_pages=num_pages, pages_per_second=pages_per_second),
            self.arena,
            self.index,
            self._report,
            self.lines.append,
            Hooks(self._write, lambda: self.now, self._sleep),
        )
        self.disk.start()

    @property
    def counts(self) -> DiskCounts:
        return self.reports[-1].counts

    def write(self, *block_hashes: bytes) -> None:
        """Queue blocks, and wait until they are done with."""
        before = len(self.reports)
        self.disk.write(WriteBlocks(block_hashes, copied=1))
        self.wait_for(lambda: len(self.reports) > before and not self.disk._queued)

    def wait_for(self, is_met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not is_met():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def close(self) -> None:
        self.disk.close()
        os.close(self._descriptor)

    def _report(self, changes: DiskChanges) -> None:
        changes.blocks.apply(self.on_disk)
        self.reports.append(changes)

    def _write(self, descriptor: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if self.error is not None:
            raise self.error
        return os.pwritev(descriptor, buffers, offset)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def running_bench(folder: Path, *, num_pages: int = 100, pages_per_second: float = 1e6) -> Iterator[Bench]:
    bench = Bench(folder, num_pages=num_pages, pages_per_second=pages_per_second)
    try:
        bench.wait_for(lambda: bool(bench.reports))
        yield bench
    finally:
        bench.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_writing_stops_for_a_minute_after_an_error(tmp_path: Path, code: int) -> None:
    with running_bench(tmp_path) as bench:
        bench.write(CHAIN[0])
        bench.error = OSError(code, os.strerror(code))
        bench.write(*CHAIN[:3])
        assert (bench.counts.num_errors, bench.counts.num_skipped) == (1, 2)
        bench.error = None
        bench.now += 59.0
        bench.write(*CHAIN[:3])
        assert (bench.counts.num_errors, bench.counts.num_skipped) == (1, 5)
        assert bench.on_disk == {CHAIN[0]}, "it can still be read"
        assert bench.disk.segments is not None
        place = bench.disk.segments.find((0, CHAIN[0]))
        assert place is not None
        assert bytes(bench.disk.segments.read((0, CHAIN[0]), place)) == repeated(CHAIN[0])
        bench.now += 2.0
        bench.write(*CHAIN[:3])
        assert bench.on_disk == set(CHAIN[:3])


def test_an_error_that_lasts_is_logged_once(tmp_path: Path) -> None:
    with running_bench(tmp_path) as bench:
        bench.error = OSError(errno.EIO, "input/output error")
        for _ in range(3):
            bench.write(CHAIN[0])
            bench.now += 61.0
        assert bench.counts.num_errors == 3
        assert len(bench.lines) == 1
        bench.error = None
        bench.write(CHAIN[0])
        bench.error = OSError(errno.EIO, "input/output error")
        bench.write(CHAIN[1])
        assert len(bench.lines) == 2


def test_a_full_volume_loses_its_oldest_segment(tmp_path: Path) -> None:
    """So that writing goes on after the pause, even if the volume is smaller than the configured size."""
    with running_bench(tmp_path, num_pages=8) as bench:  # a page a segment
        bench.write(*CHAIN[:2])
        bench.error = OSError(errno.ENOSPC, "no space left on device")
        bench.write(CHAIN[2])
        bench.error = None
        bench.now += 61.0
        bench.write(CHAIN[2])
        assert bench.on_disk == set(CHAIN[1:3])


def test_no_more_is_written_a_second_than_configured(tmp_path: Path) -> None:
    with running_bench(tmp_path, pages_per_second=2.0) as bench:
        began = bench.now
        bench.write(*CHAIN)
        assert bench.now - began == pytest.approx(2.5, abs=0.2)


def test_more_than_ten_seconds_of_writing_is_skipped(tmp_path: Path) -> None:
    with running_bench(tmp_path) as bench:
        bench.disk._max_waiting = 4
        bench.write(*CHAIN)
        assert bench.on_disk == set(CHAIN[:4])
        assert bench.counts.num_skipped == 2


def test_no_more_checkpoints_than_blocks_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request that loads a prefix has its checkpoint written, until it is reported."""
    with running_bench(tmp_path) as bench:
        answers = Event()
        monkeypatch.setattr(bench.disk, "_write", lambda *_: answers.wait(20))
        bench.disk._max_waiting = 4
        for _ in range(10):
            bench.disk.write(WriteBlocks((), CHAIN[0]))
        assert len(bench.disk._waiting) <= 4
        assert bench.disk._counts.num_skipped in (5, 6), "one may be on its way to the disk"
        answers.set()


def test_a_reset_that_cannot_be_carried_out_lets_nothing_be_written(tmp_path: Path) -> None:
    with running_bench(tmp_path) as bench:
        bench.write(*CHAIN[:2])
        (tmp_path / "discard").mkdir()  # a file cannot be made there
        bench.disk.reset()
        bench.wait_for(lambda: bool(bench.lines))
        assert bench.disk.segments is not None
        assert bench.disk.segments.find((0, CHAIN[0])) is None
        (tmp_path / "discard").rmdir()
        bench.wait_for(lambda: (tmp_path / "discard").exists())
        bench.write(CHAIN[3])
        assert bench.on_disk == {CHAIN[3]}


def test_a_job_that_ends_because_others_are_read_first_stops_no_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        written(mover, CHAIN)
        read = Segments.read

        def slow(self: Segments, key: tuple[int, bytes], place: object) -> memoryview:
            time.sleep(0.05)
            return read(self, key, place)  # type: ignore[arg-type]

        with monkeypatch.context() as patches:
            patches.setattr(Segments, "read", slow)
            for job_id in range(1, 41):
                mover.fetch(make_job("", CHAIN, first_page=10, job_id=job_id, num_ranks=0, wait_ms=1000))
            errors = {mover.fetched().error for _ in range(40)}
        assert errors == {"", "the disk did not answer in time"}
        assert read_chain(mover, CHAIN, job_id=41) == (6, "")


def test_a_disk_whose_blocks_come_slowly_ends_the_job_after_its_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block comes in time; all of them would take too long."""
    with running_mover(disk=settings(tmp_path)) as mover:
        written(mover, CHAIN)
        read = Segments.read

        def slow(self: Segments, key: tuple[int, bytes], place: object) -> memoryview:
            time.sleep(0.1)
            return read(self, key, place)  # type: ignore[arg-type]

        with monkeypatch.context() as patches:
            patches.setattr(Segments, "read", slow)
            mover.fetch(make_job("", CHAIN, first_page=10, num_ranks=0, wait_ms=20_000, max_ms=50))
            assert mover.fetched().error == "the disk did not answer in time"
        assert read_chain(mover, CHAIN, job_id=2) == (6, ""), "it is asked again"


def test_a_read_that_hangs_ends_the_job_and_writes_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_mover(disk=settings(tmp_path)) as mover:
        written(mover, CHAIN[:2])
        read = Segments.read
        hangs = [True]

        def slow(self: Segments, key: tuple[int, bytes], place: object) -> memoryview:
            while hangs[0]:
                time.sleep(0.01)
            return read(self, key, place)  # type: ignore[arg-type]

        monkeypatch.setattr(Segments, "read", slow)
        mover.fetch(make_job("", CHAIN[:2], first_page=10, num_ranks=0, wait_ms=50))
        fetched = mover.fetched()
        assert (fetched.num_blocks, fetched.error) == (0, "the disk did not answer in time")
        mover.write(10, b"of another request")
        hangs[0] = False
        time.sleep(0.05)
        assert mover.content(10) == repeated(b"of another request")
        assert read_chain(mover, CHAIN[:2], job_id=2) == (0, "the disk did not answer a short time ago")
