"""WaitingRoom: where requests wait until the engines of their model have room, or until the first one is up.

A request that nobody waits before, and for which there is room, passes without a wait, a task switch or an entry.
Who waits is let in by priority and in fair shares, as soon as an engine or the end of a request makes room. Every wait
is bounded: in number by its ticket, and in time. Knows models by name; what room there is it asks.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from proa_gateway.admission.bounds import Ticket
from proa_gateway.admission.fair_queue import Entry, FairQueue
from proa_gateway.errors import EngineUnavailable, GatewayError, QueueTimeout, ShuttingDown
from proa_gateway.observability.metrics import GatewayMetrics


class Room(Protocol):
    """How many more sequences a model's engines should get now, or at least `enough`; None: no engine can be used."""

    def __call__(self, model: str, *, enough: int = ...) -> int | None: ...


@dataclass(slots=True, eq=False)
class Waiter:
    """One request that waits. `called`: it may pass, and has not yet been seen to do so."""

    ticket: Ticket
    answer: asyncio.Future[None]
    called: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """Who waits for one model: for room, and for the first engine."""

    queue: FairQueue[Waiter] = field(default_factory=FairQueue)
    held: set[Waiter] = field(default_factory=set)
    num_called: int = 0  # sequences let in, which no engine's load shows yet

    def __len__(self) -> int:
        return len(self.queue) + len(self.held)


class WaitingRoom:
    """`changed` must be called whenever there may be more room. `close` sends everybody away."""

    def __init__(self, room: Room, metrics: GatewayMetrics) -> None:
        self._room = room
        self._metrics = metrics
        self._lines: dict[str, _Line] = {}
        self._scheduled = False
        self._closed = False

    @property
    def num_waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def may_pass(self, model: str) -> bool:
        """Whether a request need not wait. One that may must be sent before the event loop gets a turn."""
        line = self._lines.get(model)
        num_called = 0
        if line is not None:
            if len(line.queue):
                return False
            num_called = line.num_called
        return (self._room(model, enough=num_called + 1) or 0) > num_called

    async def wait(self, model: str, ticket: Ticket, seconds: float, *, num_tokens: int, cost: int) -> Entry[Waiter]:
        """Until it is this request's turn; settle what is returned. `num_tokens`: of its prompts; `cost`: expected
        output included. Raises `Overloaded`, `QueueTimeout` and `ShuttingDown`."""
        line, claim = self._line(model), ticket.claim
        waiter = self._enter(ticket, num_tokens)
        entry = line.queue.push(
            waiter, flow=claim.flow, priority=claim.priority, rank=claim.rank, weight=claim.weight, cost=cost
        )
        try:
            await self._wait(model, waiter, seconds, QueueTimeout(f"No engine had room within {seconds:.1f} s."))
        except BaseException:
            if not entry.waiting:
                entry.settle(0)
            raise
        finally:
            if waiter.called:
                line.num_called -= ticket.num_sequences
            if entry.waiting:
                line.queue.remove(entry)
            self._show(model, line)
        return entry

    async def hold(self, model: str, ticket: Ticket, seconds: float) -> None:
        """Until an engine of the model is up. Raises `Overloaded`, `EngineUnavailable` and `ShuttingDown`."""
        line = self._line(model)
        waiter = self._enter(ticket)
        line.held.add(waiter)
        late = EngineUnavailable(f"No engine got ready for the model {model!r} within {seconds:.1f} s.")
        late.retry_after = 5
        try:
            await self._wait(model, waiter, seconds, late)
        finally:
            line.held.discard(waiter)
            self._show(model, line)

    def know(self, model: str) -> None:
        """Shows the model's depth from now on, were it zero."""
        if model not in self._lines:
            self._show(model, self._line(model))

    def changed(self) -> None:
        """Lets in whom it can, in the event loop's next turn: after whoever was let in before has been sent."""
        if not self._scheduled and any(len(line) for line in self._lines.values()):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._let_in)

    def close(self) -> None:
        """Whoever waits, and whoever still comes to wait, is told to try elsewhere."""
        self._closed = True
        for line in self._lines.values():
            for waiter in [*line.queue, *line.held]:
                _tell(waiter, ShuttingDown("The gateway is shutting down."))

    # Private

    def _line(self, model: str) -> _Line:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = _Line()
        return line

    def _enter(self, ticket: Ticket, num_tokens: int = 0) -> Waiter:
        if self._closed:
            raise ShuttingDown("The gateway is shutting down.")
        waiter = Waiter(ticket, asyncio.get_running_loop().create_future())
        ticket.wait(lambda error: _tell(waiter, error), num_tokens=num_tokens)
        return waiter

    async def _wait(self, model: str, waiter: Waiter, seconds: float, late: GatewayError) -> None:
        self._show(model, self._line(model))
        self.changed()
        started = time.perf_counter()
        outcome = "given_up"
        try:
            async with asyncio.timeout(seconds):
                await waiter.answer
            outcome = "admitted"
        except TimeoutError:
            outcome = late.code or ""
            raise late from None
        except GatewayError as error:
            outcome = error.code or ""
            raise
        finally:
            self._metrics.observe_queue_wait(model, outcome, time.perf_counter() - started)
            if outcome != "admitted":
                self.changed()  # it may have been let in just before it left

    def _let_in(self) -> None:
        self._scheduled = False
        for model, line in self._lines.items():
            room = self._room(model) if len(line) else None
            if room is None:
                continue
            for waiter in line.held:
                _call(waiter)
            room -= line.num_called
            while room > 0 and (entry := line.queue.pop()) is not None:
                waiter = entry.item
                if waiter.answer.done():  # it is leaving
                    continue
                waiter.called = True
                line.num_called += waiter.ticket.num_sequences
                room -= waiter.ticket.num_sequences
                _call(waiter)
            self._show(model, line)

    def _show(self, model: str, line: _Line) -> None:
        self._metrics.queue_depth.labels(model).set(len(line))


def _call(waiter: Waiter) -> None:
    waiter.ticket.stop_waiting()
    if not waiter.answer.done():
        waiter.answer.set_result(None)


def _tell(waiter: Waiter, error: GatewayError) -> None:
    if not waiter.answer.done():
        waiter.answer.set_exception(error)
