"""Health statuses that follow from the engine's state."""

import pytest

from proa_engine.server.health import HealthState

SERVICE = "proa.engine.v1.EngineService"
READY = HealthState(loaded=True, gateway_wait_over=True)


def statuses(state: HealthState) -> tuple[bool, bool, bool]:
    """Readiness, startup, liveness."""
    by_name = state.statuses()
    assert by_name[""] == by_name[SERVICE]
    return by_name[""], by_name["startup"], by_name["liveness"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (HealthState(), (False, False, True)),
        (HealthState(loaded=True), (False, True, True)),
        (READY, (True, True, True)),
        (HealthState(loaded=True, gateway_wait_over=True, draining=True), (False, True, True)),
        (HealthState(loaded=True, gateway_wait_over=True, step_late=True), (False, True, True)),
        (HealthState(loaded=True, gateway_wait_over=True, step_late=True, dead=True), (False, True, False)),
    ],
)
def test_readiness_startup_and_liveness(state: HealthState, expected: tuple[bool, bool, bool]) -> None:
    assert statuses(state) == expected
