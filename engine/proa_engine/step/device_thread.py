"""DeviceThread: runs jobs in order on one thread. On a CPU it takes the role of a CUDA stream. SmallSteps: which steps
the waiting thread computes instead.

`submit` returns at once, so the next step is scheduled while the last one computes. Jobs submitted without waking the
thread stay in the queue until a waiting thread runs them with `help`.

All other jobs run on this thread alone. Each thread in which torch runs a parallel loop gets a team of OpenMP threads
until it ends. If all teams together have more threads than there are cores, no thread spins between loops. Measured on
two cores: 256 decodes of the built-in model then take 1.6 times as long. So work beside the steps runs on a thread that
ends with it: `run_beside_steps`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread, Timer
from typing import Any, TypeVar

import torch

T = TypeVar("T")

SMALL_STEP = 1 << 22  # multiplications, estimated as tokens times parameters


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[], None]
    wakes: bool  # False: a waiting thread may run it


class DeviceThread:
    def __init__(self, name: str) -> None:
        self._jobs: deque[_Job] = deque()
        self._running = Lock()  # locked while a thread runs jobs
        self._wanted: SimpleQueue[Future[Any] | None] = SimpleQueue()  # run jobs up to this one; None: all, then end
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], *, wake: bool = True) -> Future[T]:
        """Run `job` after all earlier ones. The future gets its result or exception.

        Without `wake` it may stay in the queue until `help`, or until a later job wakes the thread.
        """
        future: Future[T] = Future()
        self._jobs.append(_Job(lambda: _settle(future, job), wake))
        if wake:
            self._wanted.put(future)
        return future

    def help(self, future: Future[Any]) -> None:
        """Run the queued jobs up to `future`'s in the calling thread. The device thread runs them if it is busy or was
        woken for one of them.

        Later jobs stay in the queue for the threads that wait for them; otherwise the device thread, once busy, would
        run all small steps.
        """
        if not self._running.acquire(blocking=False):
            self._wanted.put(future)  # the thread may be about to stop before this job
            return
        try:
            while self._jobs and not future.done():
                if self._jobs[0].wakes:
                    self._wanted.put(future)
                    return
                self._jobs.popleft().run()
        finally:
            self._running.release()

    def close(self, timeout: float) -> bool:
        """Finish the queued jobs and end the thread. Returns False if it is still busy after `timeout` seconds."""
        self._wanted.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            future = self._wanted.get()
            is_last = future is None
            with self._running:
                while self._jobs and not (future and future.done()):
                    self._jobs.popleft().run()


def run_beside_steps(job: Callable[[], T], name: str) -> Future[T]:
    """Run `job` on a thread of its own, which does not keep the process from exiting."""
    future: Future[T] = Future()
    Thread(target=lambda: _settle(future, job), name=name, daemon=True).start()
    return future


def within(seconds: float, job: Future[T], error: Exception, on_late: Callable[[], object]) -> Future[T]:
    """Return a future with the outcome of `job`, or with `error` if `job` takes longer than `seconds`. In the latter
    case `on_late` is called when `job` ends.

    For jobs that cannot be interrupted, such as reading a file. Callbacks run on the job's thread or a timer's.
    """
    future: Future[T] = Future()

    def expire() -> None:
        with suppress(InvalidStateError):  # the job ended at this moment
            future.set_exception(error)

    def finish(job: Future[T]) -> None:
        timer.cancel()
        try:
            _settle(future, job.result)
        except InvalidStateError:
            on_late()

    timer = Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    job.add_done_callback(finish)
    return future


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)


class SmallSteps:
    """Steps of at most `max_tokens` tokens on a CPU (0: none). They run on one thread, the one that waits for their
    results.

    After a parallel region torch's threads spin on cores that the scheduler, the network and other processes need, and
    the next region waits for a thread that has lost its core. A device thread and a scheduling thread contend for the
    interpreter lock. Measured with the built-in model, one request and two cores: one thread is as fast as two, and ten
    times as fast beside busy processes; a scheduling thread that computes the steps itself needs one core instead of
    two.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._num_threads = torch.get_num_threads()

    @contextmanager
    def one_thread(self, is_small: bool) -> Iterator[None]:
        """Limit torch to one thread if the step is small. The count is process-wide, so it is restored afterwards."""
        if self._num_threads == 1 or not is_small:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._num_threads)
