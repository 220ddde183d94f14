"""SessionQueue: where later turns of conversations wait for a place in the KV cache of one of their model's engines."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from proa_gateway.admission.fair_queue import AdmissionBounds, FairQueue, QueuedRequest
from proa_gateway.errors import ShuttingDown
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.scaler.demand import Demand
from proa_gateway.sessions.model_sessions import ModelSessions
from proa_gateway.sessions.session import Turn

_TICK_SECONDS: Final = 0.25


@dataclass(slots=True, eq=False)
class _Waiting:
    """The turns that wait for places of one model's engines. Exists while there are some."""

    sessions: ModelSessions
    queue: FairQueue
    turns: dict[QueuedRequest, Turn] = field(default_factory=dict)
    head: QueuedRequest | None = None
    head_since: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Wait(NamedTuple):
    """How a turn came to its place. `new`: it is the first one, and has none; `visitor`: it goes on without one."""

    outcome: Literal["new", "resident", "waited", "visitor"]
    seconds: float = 0.0

    def span_attributes(self) -> dict[str, str | float]:
        return {"proa.session.outcome": self.outcome, "proa.session.wait_seconds": self.seconds}

    def __str__(self) -> str:
        return f"{self.outcome};ms={1000 * self.seconds:.0f}" if self.seconds else self.outcome


class SessionQueue:
    """A turn waits while other conversations fill the cache, in the order of `FairQueue`; only its head is tried. After
    `max_wait` seconds it goes on without a place, so that no conversation waits for ever. Call `changed` when there may
    be room."""

    def __init__(self, bounds: AdmissionBounds, metrics: GatewayMetrics, demand: Demand, max_wait: float) -> None:
        self._bounds = bounds
        self._metrics = metrics
        self._demand = demand
        self._max_wait = max_wait
        self._waiting: dict[ModelSessions, _Waiting] = {}
        self._is_closed = False

    async def wait(
        self, model: str, sessions: ModelSessions, hashes: Sequence[bytes], request: QueuedRequest, seconds: float
    ) -> Wait:
        """Wait until the conversation that a prompt with these blocks continues has a place, at most `seconds`.
        `model`: its name, for metrics. Raises `Overloaded` and `ShuttingDown`."""
        turn = sessions.expect(hashes)
        if turn is None:
            return Wait("new")
        if sessions.passes(turn) or (sessions not in self._waiting and sessions.is_next and sessions.place(turn)):
            return Wait("resident")
        if not sessions.may_fit(turn):
            return Wait("visitor")
        return await self._wait(sessions, turn, model, request, min(seconds, self._max_wait))

    def changed(self) -> None:
        """Try the heads of all queues."""
        for waiting in list(self._waiting.values()):
            self._admit(waiting)

    def close(self) -> None:
        """Reject the waiting requests, and all that would wait from now on, with `ShuttingDown`."""
        self._is_closed = True
        for waiting in self._waiting.values():
            for request in waiting.turns:
                request.end_wait(ShuttingDown("The gateway is shutting down."))

    async def _wait(
        self, sessions: ModelSessions, turn: Turn, model: str, request: QueuedRequest, seconds: float
    ) -> Wait:
        if self._is_closed:
            raise ShuttingDown("The gateway is shutting down.")
        waiting = self._waiting.get(sessions)
        if waiting is None:
            waiting = self._waiting[sessions] = _Waiting(sessions, self._bounds.new_queue())
        request.is_awaited = turn.session.is_awaited
        ended = self._bounds.push(waiting.queue, request)
        waiting.turns[request] = turn
        sessions.waiting[turn] = time.monotonic()
        self._demand.add_waiting_session(model, 1)
        started, outcome = time.perf_counter(), "given_up"
        self._admit(waiting)
        try:
            async with asyncio.timeout(seconds):
                await ended
            outcome = "place"
        except TimeoutError:
            outcome = "visitor"
        finally:
            self._metrics.observe_session_wait(model, outcome, time.perf_counter() - started)
            del waiting.turns[request], sessions.waiting[turn]
            self._demand.add_waiting_session(model, -1)
            self._bounds.remove(request)
            self._admit(waiting)
        return Wait("waited" if outcome == "place" else "visitor", time.perf_counter() - started)

    def _admit(self, waiting: _Waiting) -> None:
        """Admit requests from the queue's head on as long as their sessions get places."""
        now, sessions = time.monotonic(), waiting.sessions
        sessions.tick()
        while (request := waiting.queue.peek()) is not None:
            if request is not waiting.head:
                waiting.head, waiting.head_since = request, now
            turn = waiting.turns[request]
            # Without an engine it goes on to where requests wait for one.
            if sessions.has_engines and not sessions.admits(turn, waiting.head_since):
                break
            self._bounds.pop(waiting.queue)
            request.end_wait()
        self._set_timer(waiting)

    def _set_timer(self, waiting: _Waiting) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
            waiting.timer = None
        if len(waiting.queue):
            waiting.timer = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._admit, waiting)
        elif not waiting.turns and self._waiting.get(waiting.sessions) is waiting:
            del self._waiting[waiting.sessions]
            self._bounds.drop_queue(waiting.queue)
