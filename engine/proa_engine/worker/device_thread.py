"""DeviceThread: runs jobs in order on a thread of its own. On a CPU it plays the part of the CUDA stream.

Who submits a job goes on at once, so that a step is planned while the one before computes. Jobs that are not worth
waking the thread for stay in line until somebody waits for them, and helps. Knows nothing of the jobs.
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
        self._line: deque[Callable[[], None]] = deque()
        self._running = Lock()  # held by whoever takes jobs from the line
        self._wanted: SimpleQueue[Future[Any] | None] = SimpleQueue()  # what the thread is to get done; None: all
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], *, wake: bool = True) -> Future[T]:
        """Run the job after all earlier ones; the future gets its result or what it raised.

        Without `wake` it may stay in line until `help`, or until a later job wakes the thread.
        """
        future: Future[T] = Future()
        self._line.append(lambda: _settle(future, job))
        if wake:
            self._wanted.put(future)
        return future

    def help(self, future: Future[Any]) -> None:
        """Run the jobs up to this one in the caller's thread; where the device's own is at them, it does it itself.

        No job behind it: those are for who waits for them, or else the thread, once busy, would never be idle again.
        """
        if not self._running.acquire(blocking=False):
            self._wanted.put(future)  # the thread may be about to leave the line
            return
        try:
            self._run_line(future)
        finally:
            self._running.release()

    def close(self, timeout: float) -> bool:
        """Let the jobs in line finish and end the thread; False where it is still busy after `timeout` seconds."""
        self._wanted.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            future = self._wanted.get()
            is_last = future is None
            with self._running:
                self._run_line(future)

    def _run_line(self, until: Future[Any] | None) -> None:
        while self._line and not (until and until.done()):
            self._line.popleft()()


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
