"""A step is on time, then late, then hung; an idle engine is always on time."""

import threading

import pytest

from proa_engine.server.watchdog import StepDeadlines, StepStatus, Watchdog

DEADLINES = StepDeadlines.from_warm_up(0.2, step_timeout=5.0, num_ranks=1)


@pytest.mark.parametrize(
    ("age", "status"),
    [
        (None, StepStatus.ON_TIME),
        (0.0, StepStatus.ON_TIME),
        (7.0, StepStatus.ON_TIME),
        (7.1, StepStatus.LATE),
        (67.0, StepStatus.LATE),
        (67.1, StepStatus.HUNG),
    ],
)
def test_step_is_late_after_five_seconds_and_ten_warm_up_steps(age: float | None, status: StepStatus) -> None:
    assert DEADLINES.status(age) is status


def make_watchdog(started_at: list[float | None], calls: list[tuple[StepStatus, float]]) -> Watchdog:
    return Watchdog(
        StepDeadlines(late=5.0, grace=60.0),
        step_started_at=lambda: started_at[0],
        failure=lambda: None,
        on_step_status=lambda status, age: calls.append((status, age)),
        on_failure=lambda reason: None,
    )


def test_only_changes_of_status_are_reported() -> None:
    started_at: list[float | None] = [100.0]
    calls: list[tuple[StepStatus, float]] = []
    watchdog = make_watchdog(started_at, calls)

    for now in (101.0, 106.0, 107.0, 170.0):
        watchdog.check_step(now)

    assert calls == [(StepStatus.LATE, 6.0), (StepStatus.HUNG, 70.0)]


def test_status_is_on_time_again_after_a_late_step_ends() -> None:
    started_at: list[float | None] = [100.0]
    calls: list[tuple[StepStatus, float]] = []
    watchdog = make_watchdog(started_at, calls)

    watchdog.check_step(106.0)
    started_at[0] = None
    watchdog.check_step(107.0)

    assert [status for status, _ in calls] == [StepStatus.LATE, StepStatus.ON_TIME]


def test_failure_is_reported_once_on_the_watchdog_thread() -> None:
    calls: list[tuple[str, str]] = []
    happened = threading.Event()

    def on_failure(reason: str) -> None:
        calls.append((reason, threading.current_thread().name))
        happened.set()

    watchdog = Watchdog(
        DEADLINES,
        step_started_at=lambda: None,
        failure=lambda: "rank 1 was killed",
        on_step_status=lambda status, age: None,
        on_failure=on_failure,
    )
    watchdog.start()
    assert happened.wait(30)
    watchdog.stop()

    assert calls == [("rank 1 was killed", "proa-watchdog")]
