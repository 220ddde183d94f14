"""DeviceThread: runs jobs in order on a thread of its own. On a CPU it plays the part of the CUDA stream.

Who submits a job goes on at once, so that a step is planned while the one before computes. Jobs that are not worth
waking the thread for stay in line until somebody waits for them, and helps. Knows nothing of the jobs.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    def __init__(self, name: str) -> None:
        self._line: deque[Callable[[], None]] = deque()
        self._running = Lock()  # held by whoever takes jobs from the line
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # False: the last
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], *, wake: bool = True) -> Future[T]:
        """Run the job after all earlier ones; the future gets its result or what it raised.

        Without `wake` it may stay in line until `help`, or until a later job wakes the thread.
        """
        future: Future[T] = Future()
        self._line.append(lambda: _settle(future, job))
        if wake:
            self._wakes.put(True)
        return future

    def help(self) -> None:
        """Run all jobs in line in the caller's thread; where the thread is at them, it does the rest too."""
        if not self._running.acquire(blocking=False):
            self._wakes.put(True)  # it may have seen the end of the line before the last job came
            return
        try:
            self._run_line()
        finally:
            self._running.release()

    def close(self, timeout: float) -> bool:
        """Let the jobs in line finish and end the thread; False where it is still busy after `timeout` seconds."""
        self._wakes.put(False)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._wakes.get()
            with self._running:
                self._run_line()

    def _run_line(self) -> None:
        while self._line:
            self._line.popleft()()


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
