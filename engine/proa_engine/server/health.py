"""Health: what probes are told, from the few facts that decide it.

`` and the engine's service are readiness: the model is loaded, a gateway has opened a session or ten seconds have
passed since loading, nothing is draining, no step is late. `startup` is loaded. `liveness` is that the process can
still be of use. Runs on the I/O thread.
"""

from dataclasses import dataclass, replace
from typing import Any

from grpc_health.v1.health import aio

from proa_engine.server import convert

SETTLE_SECONDS = 10.0  # after loading, for gateways to open a session


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFacts:
    loaded: bool = False
    settled: bool = False  # a gateway has opened a session, or it had the time to
    draining: bool = False
    step_late: bool = False
    dead: bool = False

    def statuses(self) -> dict[str, bool]:
        """Service name -> whether it is serving."""
        ready = self.loaded and self.settled and not (self.draining or self.step_late or self.dead)
        return {"": ready, convert.SERVICE: ready, "startup": self.loaded, "liveness": not self.dead}


class Health:
    """Keeps grpc.health.v1 in step with the facts."""

    def __init__(self) -> None:
        self.facts = HealthFacts()
        self.servicer = aio.HealthServicer()

    async def update(self, **changes: Any) -> None:
        self.facts = replace(self.facts, **changes)
        for service, serving in self.facts.statuses().items():
            await self.servicer.set(service, convert.health_to_pb(serving))
