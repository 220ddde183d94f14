"""DeviceThread: runs jobs in order on a thread of its own. On a CPU it plays the part of the CUDA stream.

Who submits a job goes on at once, so that a step is planned while the one before computes. Knows nothing of the jobs.
"""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run the job after all earlier ones; the future gets its result or what it raised."""
        future: Future[T] = Future()
        self._jobs.put(lambda: _settle(future, job))
        return future

    def close(self, timeout: float) -> bool:
        """Let the jobs in line finish and end the thread; False where it is still busy after `timeout` seconds."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
