"""Health: the grpc.health.v1 statuses, computed from the state of the engine. Runs on the I/O thread.

`` and the engine's service are readiness: the model is loaded, a gateway has opened a session or ten seconds have
passed since loading, the engine is not draining or asleep, and no step is late. `startup`: the model is loaded.
`liveness`: the engine has not failed.
"""

from dataclasses import dataclass, replace
from typing import Any

from grpc_health.v1.health import aio

from proa_engine.server import convert

GATEWAY_WAIT_SECONDS = 10.0  # after loading, for a gateway to open a session


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthState:
    loaded: bool = False
    gateway_wait_over: bool = False  # a gateway has opened a session, or GATEWAY_WAIT_SECONDS have passed
    draining: bool = False
    step_late: bool = False
    asleep: bool = False
    dead: bool = False

    def statuses(self) -> dict[str, bool]:
        """Service name -> whether it is serving."""
        disturbed = self.draining or self.step_late or self.asleep or self.dead
        ready = self.loaded and self.gateway_wait_over and not disturbed
        return {"": ready, convert.SERVICE: ready, "startup": self.loaded, "liveness": not self.dead}


class Health:
    """The health service: `update` changes the state and publishes the statuses that follow from it."""

    def __init__(self) -> None:
        self.state = HealthState()
        self.servicer = aio.HealthServicer()

    async def update(self, **changes: Any) -> None:
        """Change fields of `HealthState`."""
        self.state = replace(self.state, **changes)
        for service, serving in self.state.statuses().items():
            await self.servicer.set(service, convert.health_to_pb(serving))
