"""A mover's process that dies, does not start, or is sent more than a socket holds: each job has one end."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proa_engine.core.types import Copies
from proa_engine.memory import mover_process
from proa_engine.memory.arena_memory import anonymous_memory
from proa_engine.memory.mover_process import MoverProcess
from proa_engine.mover.messages import Fetch, Init, Progress, ToCore
from proa_engine.option_groups import LOOPBACK
from support.movers import FINGERPRINT, LAYOUT, hashes, make_job

NOBODY = "127.0.0.1:9"  # no process listens there


class Run:
    """A mover's process, and what it has sent."""

    def __init__(self, arena: int) -> None:
        self.ends: list[Progress] = []
        self.lines: list[str] = []
        init = Init(LAYOUT, "127.0.0.1", 0, rank=0, num_ranks=1, fingerprint=FINGERPRINT, since=0.0, sources=LOOPBACK)
        self.mover = MoverProcess(init, arena, self._take, self.lines.append)

    def _take(self, message: ToCore) -> None:
        assert isinstance(message, Progress)
        self.ends.append(message)

    @property
    def pid(self) -> int:
        return self.mover._process.pid

    def kill(self) -> None:
        self.mover._process.kill()

    def ask(self, error: str) -> bool:
        """Send a job. Returns whether this or an earlier one ended with the error."""
        self.mover.send(Fetch(make_job(NOBODY, hashes(1), wait_ms=20_000)))
        return any(error in end.fetched.error for end in self.ends)

    def wait_for(self, is_met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_met():
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)


@contextmanager
def running() -> Iterator[Run]:
    memory = anonymous_memory(LAYOUT)
    run = Run(memory.descriptor)
    try:
        yield run
    finally:
        run.mover.close()
        memory.close()


@pytest.fixture(autouse=True)
def _restarts_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_process, "_RESTART_SECONDS", 0.2)


def test_a_job_of_a_prompt_larger_than_a_sockets_buffer_reaches_the_mover() -> None:
    with running() as run:
        pid, chain = run.pid, hashes(1) * 1_000_000
        run.mover.send(Fetch(make_job(NOBODY, chain, wait_ms=20_000)))
        run.wait_for(lambda: bool(run.ends))
        assert "no connection" in run.ends[0].fetched.error
        assert run.pid == pid


@pytest.mark.parametrize(("executable", "reason"), [("/bin/false", "did not start"), ("/no/such/file", "No such file")])
def test_a_mover_that_cannot_be_started_again_is_tried_later(
    executable: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as run:
        python = sys.executable
        monkeypatch.setattr(sys, "executable", executable)
        run.kill()
        run.wait_for(lambda: any(reason in line for line in run.lines))
        monkeypatch.setattr(sys, "executable", python)
        run.wait_for(lambda: run.ask("no connection"))


def test_nothing_waits_for_a_mover_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a step, which reports its copies, nor the engine's end."""
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setattr(mover_process, "_EXIT_SECONDS", 0.2)
    with running() as run:
        pid = run.pid
        monkeypatch.setattr(sys, "executable", str(silent))
        run.kill()
        run.wait_for(lambda: run.pid != pid)
        started = time.monotonic()
        run.mover.copied(Copies(1))
        run.mover.send(Fetch(make_job(NOBODY, hashes(1))))
        assert time.monotonic() - started < 10  # it has 30 s to answer
    assert time.monotonic() - started < 10
    assert [end.fetched.error for end in run.ends] == ["the mover has died"]


def test_each_job_that_is_sent_around_a_death_ends_once() -> None:
    with running() as run:
        num_sent = 0
        for _ in range(3):
            run.wait_for(lambda: run.mover._unsent is not None)
            for index in range(200):
                if index == 100:
                    run.kill()
                num_sent += 1
                run.mover.send(Fetch(make_job(NOBODY, hashes(1), job_id=num_sent, wait_ms=20_000)))
        run.wait_for(lambda: len(run.ends) >= num_sent)
    assert Counter(end.fetched.job_id for end in run.ends) == Counter(range(1, num_sent + 1))
