"""Threads for calls that do not return on a signal, such as those of Rust libraries. Ctrl-C and SIGTERM raise their
exception in the main thread, which must not be in such a call, nor join its thread when it exits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from threading import Event, Thread

_GRACE_SECONDS = 1.0  # for threads to see `stop` after an interrupt


class NotDone(Exception):
    """Jobs have not ended in time."""


def run(jobs: Iterable[Callable[[], None]], num_threads: int, stop: Event, *, seconds: float | None = None) -> None:
    """Run the jobs in daemon threads. After an error `stop` is set, no further job begins, and the first error is
    raised when the jobs that run have ended. An interrupt of the calling thread sets `stop` and waits for 1 s only. So
    does NotDone, which is raised if the jobs have not ended after `seconds`.
    """
    waiting, errors = deque(jobs), list[BaseException]()

    def work() -> None:
        while not stop.is_set():
            try:
                job = waiting.popleft()
            except IndexError:
                return
            try:
                job()
            except BaseException as error:
                errors.append(error)
                stop.set()

    threads = [
        Thread(target=work, name=f"proa-download-{number}", daemon=True)
        for number in range(min(num_threads, len(waiting)))
    ]
    try:
        for each in threads:
            each.start()
        end = None if seconds is None else time.monotonic() + seconds
        for each in threads:
            each.join(None if end is None else max(end - time.monotonic(), 0))
        if any(each.is_alive() for each in threads):
            raise NotDone
    except BaseException:
        stop.set()
        deadline = time.monotonic() + _GRACE_SECONDS
        for each in threads:
            if each.is_alive():  # and not one that was not started
                each.join(max(deadline - time.monotonic(), 0))
        raise
    if errors:
        raise errors[0]
