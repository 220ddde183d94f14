"""Background tasks run again after an exception, with growing pauses."""

import asyncio
import logging

import pytest

from proa_gateway.keep_running import FIRST_PAUSE, LAST_PAUSE, keep_running


class Clock:
    """Time passes only while a task sleeps. `pauses`: how long it slept between its failures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


async def test_the_pauses_double_up_to_a_bound_and_begin_anew_after_a_long_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    num_runs = 0

    async def work() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 10:
            clock.now += 2 * LAST_PAUSE
        if num_runs < 12:
            raise KeyError("name")

    await keep_running("following the engine", work)
    assert clock.pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert clock.pauses[8:] == [LAST_PAUSE, FIRST_PAUSE, 2 * FIRST_PAUSE]
    assert [each.levelno for each in caplog.records] == [logging.ERROR] * 11
    assert caplog.records[0].getMessage() == "following the engine failed, trying again in 1 s"
    assert caplog.records[0].exc_info is not None


async def test_a_task_that_is_cancelled_ends() -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_running("waiting", work))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
