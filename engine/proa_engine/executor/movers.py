"""RankMovers: the movers of all ranks as one. A job is as far as it is on every rank."""

from collections.abc import Callable, Sequence
from threading import Lock

from proa_engine.core.mover import Fetched, FetchJob
from proa_engine.mover.messages import Cancel, Fetch, Reset


class RankMovers:
    """`send` passes a message to every rank's mover; `take` is called with each one's answers, from any thread."""

    def __init__(self, send: Callable[[Fetch | Cancel | Reset], None], num_ranks: int) -> None:
        self._send = send
        self._num_ranks = num_ranks
        self._ends: dict[int, list[Fetched]] = {}  # by job id: those of the ranks that have ended
        self._lock = Lock()
        self._on_fetched: Callable[[Fetched], None] | None = None

    def listen(self, on_fetched: Callable[[Fetched], None]) -> None:
        self._on_fetched = on_fetched

    def fetch(self, job: FetchJob) -> None:
        self._send(Fetch(job))

    def cancel(self, job_id: int) -> None:
        self._send(Cancel(job_id))

    def reset(self, since: float, copied: int) -> None:
        self._send(Reset(since, copied))

    def take(self, fetched: Fetched) -> None:
        """Take the end of one rank's part of a job."""
        with self._lock:
            ends = self._ends.setdefault(fetched.job_id, [])
            ends.append(fetched)
            if len(ends) < self._num_ranks:
                return
            del self._ends[fetched.job_id]
        assert self._on_fetched is not None, "only a listener starts jobs"
        self._on_fetched(merge(ends))


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
