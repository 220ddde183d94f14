"""RankMovers: the movers of all ranks as one. A job is as far as it is on every rank."""

from collections.abc import Callable, Sequence
from threading import Lock

from proa_engine.core.kv.mover import Adopted, Fetched, FetchJob, FromMover
from proa_engine.executor.disk_ranks import DiskRanks
from proa_engine.mover.messages import (
    Adopt,
    AdoptionProgress,
    Cancel,
    Fetch,
    FromCore,
    OnDisk,
    Progress,
    Reset,
    ToCore,
    WriteBlocks,
)


class RankMovers:
    """`send` passes a message to every rank's mover; `take` is called with each one's answers, from any thread.

    `adopts`: host memory outlives the engine.
    """

    def __init__(self, send: Callable[[FromCore], None], num_ranks: int, *, adopts: bool = False) -> None:
        self._send = send
        self._num_ranks = num_ranks
        self._adopts = adopts
        self._ends: dict[int, list[Fetched]] = {}  # by job id: those of the ranks that have ended
        self._ranges: dict[int, list[Adopted]] = {}  # by number: those of the ranks that have answered
        self._disks = DiskRanks(num_ranks)
        self._lock = Lock()
        self._early: list[FromMover] = []  # messages before there is a listener
        self._on_message: Callable[[FromMover], None] = self._early.append

    def listen(self, on_message: Callable[[FromMover], None]) -> None:
        with self._lock:
            self._on_message = on_message
            for message in self._early:
                on_message(message)
            self._early = []
        if self._adopts:
            self._send(Adopt())

    def fetch(self, job: FetchJob) -> None:
        self._send(Fetch(job))

    def cancel(self, job_id: int) -> None:
        self._send(Cancel(job_id))

    def write(self, blocks: Sequence[bytes], checkpoint: bytes, copied: int) -> None:
        self._send(WriteBlocks(tuple(blocks), checkpoint, copied))

    def reset(self, since: float, copied: int) -> None:
        self._send(Reset(since, copied))

    def take(self, message: ToCore) -> None:
        """Take a message of one rank, and pass it on when all ranks have sent theirs."""
        with self._lock:
            match message:
                case Progress(fetched):
                    merged: FromMover | None = self._take_end(fetched)
                case AdoptionProgress(adopted):
                    merged = self._take_range(adopted)
                case OnDisk(rank, changes):
                    merged = self._disks.take(rank, changes)
            if merged is None:
                return
            self._on_message(merged)  # under the lock, so that changes of the disk stay in order

    def _take_end(self, fetched: Fetched) -> Fetched | None:
        ends = self._ends.setdefault(fetched.job_id, [])
        ends.append(fetched)
        return merge(self._ends.pop(fetched.job_id)) if len(ends) == self._num_ranks else None

    def _take_range(self, adopted: Adopted) -> Adopted | None:
        of_ranks = self._ranges.setdefault(adopted.number, [])
        of_ranks.append(adopted)
        return merge_adopted(self._ranges.pop(adopted.number)) if len(of_ranks) == self._num_ranks else None


def merge(ends: Sequence[Fetched]) -> Fetched:
    """Return what every rank has of a job: its leading blocks, and the checkpoint if all have the same."""
    checkpoints = {end.checkpoint for end in ends}
    return Fetched(
        job_id=ends[0].job_id,
        num_blocks=min(end.num_blocks for end in ends),
        checkpoint=checkpoints.pop() if len(checkpoints) == 1 else b"",
        num_bytes=sum(end.num_bytes for end in ends),
        is_done=True,
        error=next((end.error for end in ends if end.error), ""),
    )


def merge_adopted(ranges: Sequence[Adopted]) -> Adopted:
    """Return what every rank has in a range: the units with the same content in the same place, and the checkpoints of
    the same units."""
    first, *others = ranges
    contents = [{unit[:3] for unit in each.units} for each in others]
    checkpoints = [{stored.block_hash: stored for stored in each.checkpoints} for each in others]
    return Adopted(
        number=first.number,
        first_page=first.first_page,
        end_page=first.end_page,
        units=tuple(unit for unit in first.units if all(unit[:3] in content for content in contents)),
        checkpoints=tuple(
            stored for stored in first.checkpoints if all(of.get(stored.block_hash) == stored for of in checkpoints)
        ),
        is_done=first.is_done,
    )
