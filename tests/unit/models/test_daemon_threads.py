"""Jobs in threads: the first error is raised, and an interrupt does not wait for a job that does not return."""

import signal
import threading

import pytest

from proa_engine.sources import daemon_threads


def test_all_jobs_run_and_the_threads_end() -> None:
    done = list[int]()
    before = threading.active_count()
    daemon_threads.run([lambda each=each: done.append(each) for each in range(20)], 4, threading.Event())  # type: ignore[misc]
    assert sorted(done) == list(range(20))
    assert threading.active_count() == before


def test_after_an_error_no_further_job_begins() -> None:
    begun, stop = list[int](), threading.Event()

    def job(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise ValueError("one")

    with pytest.raises(ValueError, match="one"):
        daemon_threads.run([lambda each=each: job(each) for each in range(4)], 1, stop)  # type: ignore[misc]
    assert begun == [0, 1]
    assert stop.is_set()


def test_an_interrupt_does_not_wait_for_a_job_that_does_not_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "_GRACE_SECONDS", 0.0)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
    stop, end = threading.Event(), threading.Event()

    def job() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        end.wait(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            daemon_threads.run([job], 1, stop)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert stop.is_set()
    assert not end.is_set()
    end.set()
