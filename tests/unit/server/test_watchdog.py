"""A step is on time, then late, then hung; an idle engine is always on time."""

import threading

import pytest

from proa_engine.server.watchdog import StepDeadlines, StepStatus, Watchdog

DEADLINES = StepDeadlines.of(0.2, step_timeout=5.0)


@pytest.mark.parametrize(
    ("age", "status"),
    [
        (0.0, StepStatus.ON_TIME),
        (7.0, StepStatus.ON_TIME),
        (7.1, StepStatus.LATE),
        (75.0, StepStatus.LATE),
        (75.1, StepStatus.HUNG),
    ],
)
def test_a_step_is_late_after_five_seconds_and_ten_times_what_it_should_take(age: float, status: StepStatus) -> None:
    assert DEADLINES.status(age) is status


def make_watchdog(started_at: list[float | None], calls: list[tuple[StepStatus, float]]) -> Watchdog:
    return Watchdog(
        5.0,
        step_started_at=lambda: started_at[0],
        expected_seconds=lambda: 0.0,
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


def test_the_deadlines_grow_with_the_work_of_the_running_step() -> None:
    """A chunk behind a long context may take minutes; a small step after it is late after seconds again."""
    started_at: list[float | None] = [100.0]
    expected = [30.0]
    statuses: list[StepStatus] = []
    watchdog = Watchdog(
        5.0,
        step_started_at=lambda: started_at[0],
        expected_seconds=lambda: expected[0],
        failure=lambda: None,
        on_step_status=lambda status, age: statuses.append(status),
        on_failure=lambda reason: None,
    )

    watchdog.check_step(100.0 + 5.0 + 10 * 30.0)
    assert statuses == []
    watchdog.check_step(100.0 + 5.0 + 60.0 + 50 * 30.0)
    assert statuses == [StepStatus.LATE]
    started_at[0], expected[0] = 2000.0, 0.0
    watchdog.check_step(2004.0)
    watchdog.check_step(2006.0)
    assert statuses == [StepStatus.LATE, StepStatus.ON_TIME, StepStatus.LATE]


def test_failure_is_reported_once_on_the_watchdog_thread() -> None:
    calls: list[tuple[str, str]] = []
    happened = threading.Event()

    def on_failure(reason: str) -> None:
        calls.append((reason, threading.current_thread().name))
        happened.set()

    watchdog = Watchdog(
        5.0,
        step_started_at=lambda: None,
        expected_seconds=lambda: 0.0,
        failure=lambda: "rank 1 was killed",
        on_step_status=lambda status, age: None,
        on_failure=on_failure,
    )
    watchdog.start()
    assert happened.wait(30)
    watchdog.stop()

    assert calls == [("rank 1 was killed", "proa-watchdog")]
