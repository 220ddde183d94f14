"""DeviceThread: runs jobs in order on one thread. On a CPU it takes the role of a CUDA stream.

`submit` returns at once, so the next step is scheduled while the last one computes. Jobs submitted without waking the
thread stay in the queue until a waiting thread runs them with `help`.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")


class DeviceThread:
    def __init__(self, name: str) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = Lock()  # held while a thread runs jobs
        self._wanted: SimpleQueue[Future[Any] | None] = SimpleQueue()  # run jobs up to this one; None: all, then end
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], *, wake: bool = True) -> Future[T]:
        """Run `job` after all earlier ones; the future gets its result or exception.

        Without `wake` it may stay in the queue until `help`, or until a later job wakes the thread.
        """
        future: Future[T] = Future()
        self._jobs.append(lambda: _settle(future, job))
        if wake:
            self._wanted.put(future)
        return future

    def help(self, future: Future[Any]) -> None:
        """Run the queued jobs up to this one in the calling thread, or have the device thread do so if it is busy.

        Later jobs stay in the queue for the threads that wait for them; otherwise the device thread, once busy, would
        run all small steps.
        """
        if not self._running.acquire(blocking=False):
            self._wanted.put(future)  # the thread may be about to stop before this job
            return
        try:
            self._run_jobs(future)
        finally:
            self._running.release()

    def close(self, timeout: float) -> bool:
        """Finish the queued jobs and end the thread; False if it is still busy after `timeout` seconds."""
        self._wanted.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            future = self._wanted.get()
            is_last = future is None
            with self._running:
                self._run_jobs(future)

    def _run_jobs(self, until: Future[Any] | None) -> None:
        while self._jobs and not (until and until.done()):
            self._jobs.popleft()()


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
