"""What probes are told."""

import pytest

from proa_engine.server.health import HealthFacts

SERVICE = "proa.engine.v1.EngineService"
READY = HealthFacts(loaded=True, settled=True)


def statuses(facts: HealthFacts) -> tuple[bool, bool, bool]:
    """Readiness, startup, liveness."""
    by_name = facts.statuses()
    assert by_name[""] == by_name[SERVICE]
    return by_name[""], by_name["startup"], by_name["liveness"]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (HealthFacts(), (False, False, True)),
        (HealthFacts(loaded=True), (False, True, True)),
        (READY, (True, True, True)),
        (HealthFacts(loaded=True, settled=True, draining=True), (False, True, True)),
        (HealthFacts(loaded=True, settled=True, step_late=True), (False, True, True)),
        (HealthFacts(loaded=True, settled=True, step_late=True, dead=True), (False, True, False)),
    ],
)
def test_readiness_startup_and_liveness(facts: HealthFacts, expected: tuple[bool, bool, bool]) -> None:
    assert statuses(facts) == expected
