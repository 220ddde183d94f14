"""SessionQueue: where later turns of conversations wait for a place in their engine's KV cache."""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from proa.contract import SchedulerStats
from proa_gateway.admission.fair_queue import AdmissionBounds, FairQueue, QueuedRequest
from proa_gateway.errors import ShuttingDown
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.sessions.engine_sessions import EngineSessions
from proa_gateway.sessions.session_table import Turn

_TICK_SECONDS: Final = 0.25


class Engine(Protocol):
    load_stats: SchedulerStats
    sessions: EngineSessions | None

    @property
    def usable(self) -> bool: ...

    @property
    def model_name(self) -> str | None: ...


@dataclass(slots=True, eq=False)
class _Waiting:
    """The turns that wait for one engine's places. Exists while there are some."""

    engine: Engine
    sessions: EngineSessions  # the engine's when they came: it knows no turns any more once it has connected again
    queue: FairQueue
    turns: dict[QueuedRequest, Turn] = field(default_factory=dict)
    head: QueuedRequest | None = None
    head_since: float = 0.0
    timer: asyncio.TimerHandle | None = None


class SessionQueue:
    """A turn waits while other conversations fill the cache, in the order of `FairQueue`; only its head is tried. After
    `max_wait` seconds it goes on without a place, so that no conversation waits for ever. Call `changed` when there may
    be room."""

    def __init__(
        self, bounds: AdmissionBounds, engines: Collection[Engine], metrics: GatewayMetrics, max_wait: float
    ) -> None:
        self._bounds = bounds
        self._engines = engines
        self._metrics = metrics
        self._max_wait = max_wait
        self._waiting: dict[Engine, _Waiting] = {}
        self._is_closed = False

    async def wait(self, model: str, hashes: Sequence[bytes], request: QueuedRequest, seconds: float) -> None:
        """Wait until the conversation that a prompt with these blocks continues has a place, at most `seconds`. Raises
        `Overloaded` and `ShuttingDown`."""
        for engine in self._engines:
            sessions = engine.sessions if engine.usable and engine.model_name == model else None
            if sessions is not None and (turn := sessions.expect(hashes)):
                if not turn.session.is_resident and (engine in self._waiting or not sessions.admit(turn)):
                    await self._wait(engine, sessions, turn, model, request, min(seconds, self._max_wait))
                return

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
        self,
        engine: Engine,
        sessions: EngineSessions,
        turn: Turn,
        model: str,
        request: QueuedRequest,
        seconds: float,
    ) -> None:
        if self._is_closed:
            raise ShuttingDown("The gateway is shutting down.")
        waiting = self._waiting.get(engine)
        if waiting is None:
            waiting = _Waiting(engine, sessions, self._bounds.new_queue())
            self._waiting[engine] = waiting
        ended = self._bounds.push(waiting.queue, request)
        waiting.turns[request] = turn
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
            del waiting.turns[request]
            self._bounds.remove(request)
            request.settle(0)  # what the request costs is counted where it waits for capacity
            self._admit(waiting)

    def _admit(self, waiting: _Waiting) -> None:
        """Admit requests from the queue's head on as long as their sessions get places."""
        engine, now = waiting.engine, time.monotonic()
        is_lost = engine.sessions is not waiting.sessions or not engine.usable
        stats = engine.load_stats
        waiting.sessions.tick(list(waiting.turns.values()), is_busy=stats.num_waiting_reqs > stats.num_fetching_reqs)
        while (request := waiting.queue.peek()) is not None:
            if request is not waiting.head:
                waiting.head, waiting.head_since = request, now
            turn, rate = waiting.turns[request], stats.prefill_tokens_per_second
            has_place = is_lost or waiting.sessions.admit(turn)
            if not has_place and not waiting.sessions.displace(turn, rate, waiting.head_since):
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
        elif not waiting.turns and self._waiting.get(waiting.engine) is waiting:
            del self._waiting[waiting.engine]
            self._bounds.drop_queue(waiting.queue)
