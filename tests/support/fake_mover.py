"""FakeMover: fetches from another engine that has everything that this one ever stored, and what it is told."""

import random
from collections.abc import Callable, Sequence

from proa_engine.core.kv.mover import Fetched, FetchJob, FromMover
from proa_engine.core.types import NO_STATE, Copies
from support.fake_disk import Content, Contents, FakeDisk
from support.fake_host import FakeHost

GARBAGE = "unfinished"  # in pages that a job may write


class Never(random.Random):
    """Ends no job by itself, and delivers all that there is."""

    def random(self) -> float:
        return 1.0

    def randint(self, a: int, b: int) -> int:
        return b

    def choice(self, seq: Sequence[object]) -> object:  # type: ignore[override]
        return seq[-1]


class FakeMover:
    """It writes any page of a job at any time between the end of the copies before the job and the job's end.

    It reports changes of `disk`, if there is one, late.
    """

    def __init__(self, host: FakeHost, rng: random.Random, disk: FakeDisk | None = None) -> None:
        self.disk = disk
        self.num_fetched = 0  # pages
        self.jobs: dict[int, FetchJob] = {}
        self._host = host
        self._rng = rng
        self._copied = 0
        self._forgotten = 0  # serial of the last copies before the last reset
        self._stored = Contents()  # since the last reset
        self._before_reset: dict[int, Contents] = {}  # of jobs that had begun: what they may have received
        self._cancelled: set[int] = set()
        self._on_message: Callable[[FromMover], None] | None = None
        host.on_copied = self._take_copies

    def learn(self, other: "FakeMover") -> None:
        """Let the source, and the disk, have what another core, over the same model, has stored since its last
        reset."""
        self._stored.update(other._stored)
        if self.disk is not None:
            self.disk.contents.update(other._stored)
            self.disk.open()

    def listen(self, on_message: Callable[[FromMover], None]) -> None:
        self._on_message = on_message
        if self.disk is not None:
            self.disk.open()

    def fetch(self, job: FetchJob) -> None:
        assert job.addresses or self.disk is not None
        assert len(job.pages) <= len(job.chain) - job.num_held
        assert job.job_id not in self.jobs
        self.jobs[job.job_id] = job

    def cancel(self, job_id: int) -> None:
        self._cancelled.add(job_id)  # it may have ended

    def write(self, blocks: Sequence[bytes], checkpoint: bytes, copied: int) -> None:
        assert self.disk is not None
        self.disk.write(blocks, checkpoint, copied)

    def reset(self, since: float, copied: int) -> None:
        self._before_reset = {job_id: self._stored for job_id in self.jobs} | self._before_reset
        self._stored, self._forgotten = Contents(), copied
        if self.disk is not None:
            self._report_disk()  # of before the reset
            self.disk.reset()

    def advance(self, *, to_end: bool = False) -> None:
        """Write to the pages of open jobs, and end some of them; all that can end with `to_end`."""
        for job in list(self.jobs.values()):
            if self._copied < job.copied:
                continue
            self._spoil(job)
            if to_end or self._rng.random() < 0.3:
                self._end(job)
        if self.disk is not None:
            self.disk.advance(self._stored, self._copied, self._rng, to_end=to_end)
            if to_end or self._rng.random() < 0.3:
                self._report_disk()

    def _report_disk(self) -> None:
        assert self.disk is not None
        assert self._on_message is not None
        if (changes := self.disk.take_changes()) is not None:
            self._on_message(changes)

    def _end(self, job: FetchJob) -> None:
        del self.jobs[job.job_id]
        is_cancelled = job.job_id in self._cancelled and self._rng.random() < 0.5  # otherwise it was complete already
        most = self._rng.choice([0, self._rng.randint(0, len(job.pages)), len(job.pages), len(job.pages)])
        source, num_blocks = self._before_reset.pop(job.job_id, self._stored), 0
        if not job.addresses:
            assert self.disk is not None
            source = self.disk.contents
        for block_hash, page in zip(job.chain[job.num_held :], job.pages, strict=True):
            if is_cancelled or num_blocks == most or (0, block_hash) not in source.blocks:
                break
            self._host.fill(page, source.blocks[0, block_hash])
            num_blocks += 1
        checkpoint = b"" if is_cancelled else self._fill_checkpoint(source, job, job.num_held + num_blocks)
        self.num_fetched += num_blocks
        assert self._on_message is not None
        self._on_message(
            Fetched(job_id=job.job_id, num_blocks=num_blocks, checkpoint=checkpoint, num_bytes=num_blocks, is_done=True)
        )

    def _fill_checkpoint(self, source: Contents, job: FetchJob, num_columns: int) -> bytes:
        for block_hash in reversed(job.chain[:num_columns] if job.needs_checkpoint else ()):
            stored, state = source.checkpoints.get(block_hash, (None, None))
            if stored is None or not source.has_tails(stored):
                continue
            for table, (pages, tail) in enumerate(zip(job.tails, stored.tails, strict=True), start=1):
                for page, (_, of_tail) in zip(pages, reversed(tail), strict=False):
                    self._host.fill(page, source.blocks[table, of_tail])
            if job.state != NO_STATE:
                self._host.fill_state(job.state, state)
            return block_hash
        return b""

    def _spoil(self, job: FetchJob) -> None:
        for page in [*job.pages, *(page for tail in job.tails for page in tail)]:
            self._host.fill(page, GARBAGE)
        if job.state != NO_STATE:
            self._host.fill_state(job.state, GARBAGE)

    def _take_copies(self, copies: Copies, pages: Sequence[Content], states: Sequence[Content]) -> None:
        """Learn what these complete copies have stored."""
        assert copies.serial == self._copied + 1, "copies are numbered without a gap"
        self._copied = copies.serial
        if copies.serial <= self._forgotten:
            return
        for page, block_hash in copies.stored_blocks:
            self._stored.blocks[0, block_hash] = pages[page]
        for stored in copies.stored_checkpoints:
            for table, tail in enumerate(stored.tails, start=1):
                for page, block_hash in tail:
                    self._stored.blocks[table, block_hash] = pages[page]
            state = None if stored.state == NO_STATE else states[stored.state]
            self._stored.checkpoints[stored.block_hash] = stored, state
