"""A step is fine, then late, then beyond hope; an idle engine is always fine."""

import threading

import pytest

from proa_engine.server.watchdog import StepLimits, Verdict, Watchdog

LIMITS = StepLimits.from_warm_up(0.2, step_timeout=5.0, hope=60.0)


@pytest.mark.parametrize(
    ("age", "verdict"),
    [
        (None, Verdict.FINE),
        (0.0, Verdict.FINE),
        (7.0, Verdict.FINE),
        (7.1, Verdict.LATE),
        (67.0, Verdict.LATE),
        (67.1, Verdict.DEAD),
    ],
)
def test_step_is_late_after_five_seconds_and_ten_warm_up_steps(age: float | None, verdict: Verdict) -> None:
    assert LIMITS.judge(age) is verdict


def make_watchdog(started_at: list[float | None], told: list[tuple[Verdict, float]]) -> Watchdog:
    return Watchdog(
        StepLimits(late=5.0, hope=60.0),
        step_started_at=lambda: started_at[0],
        failure=lambda: None,
        on_verdict=lambda verdict, age: told.append((verdict, age)),
        on_failure=lambda reason: None,
    )


def test_only_changes_are_told() -> None:
    started_at: list[float | None] = [100.0]
    told: list[tuple[Verdict, float]] = []
    watchdog = make_watchdog(started_at, told)

    for now in (101.0, 106.0, 107.0, 170.0):
        watchdog.look(now)

    assert told == [(Verdict.LATE, 6.0), (Verdict.DEAD, 70.0)]


def test_late_step_that_ends_is_forgiven() -> None:
    started_at: list[float | None] = [100.0]
    told: list[tuple[Verdict, float]] = []
    watchdog = make_watchdog(started_at, told)

    watchdog.look(106.0)
    started_at[0] = None
    watchdog.look(107.0)

    assert [verdict for verdict, _ in told] == [Verdict.LATE, Verdict.FINE]


def test_failure_is_told_once_and_by_the_watchdogs_own_thread() -> None:
    told: list[tuple[str, str]] = []
    happened = threading.Event()

    def on_failure(reason: str) -> None:
        told.append((reason, threading.current_thread().name))
        happened.set()

    watchdog = Watchdog(
        LIMITS,
        step_started_at=lambda: None,
        failure=lambda: "rank 1 was killed",
        on_verdict=lambda verdict, age: None,
        on_failure=on_failure,
    )
    watchdog.start()
    assert happened.wait(30)
    watchdog.stop()

    assert told == [("rank 1 was killed", "proa-watchdog")]
