"""RequestQueue: where requests wait for capacity of their model's engines, or for its first engine.

While nothing waits and there is capacity, a request passes without an entry and without a task switch. Waiting
requests are admitted in the order of `FairQueue` when an engine reports or a request ends. Every wait has a time limit.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from proa_gateway.admission.fair_queue import AdmissionBounds, FairQueue, QueuedRequest
from proa_gateway.errors import EngineUnavailable, GatewayError, QueueTimeout, ShuttingDown
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.scaler.demand import Demand


class Capacity(Protocol):
    """How many more sequences a model's engines should get now, counted up to `enough`; None: no engine is usable."""

    def __call__(self, model: str, *, enough: int = ...) -> int | None: ...


@dataclass(slots=True, eq=False)
class ModelQueue:
    """The requests that wait for one model."""

    for_capacity: FairQueue  # until the model's engines have room
    for_engine: FairQueue  # until the model's first engine is up
    num_unsent: int = 0  # sequences that were admitted, but are in no engine's load yet

    def __len__(self) -> int:
        return len(self.for_capacity) + len(self.for_engine)


class RequestQueue:
    """Call `capacity_changed` whenever there may be more capacity."""

    def __init__(self, bounds: AdmissionBounds, capacity: Capacity, metrics: GatewayMetrics, demand: Demand) -> None:
        self._bounds = bounds
        self._capacity = capacity
        self._metrics = metrics
        self._demand = demand
        self._models: dict[str, ModelQueue] = {}  # by name; entries stay, for their depth is exported
        self._scheduled = False  # `_admit_waiting` will run in the loop's next iteration
        self._closed = False  # no request waits any more

    @property
    def num_waiting(self) -> int:
        return self._bounds.waiting.total

    def has_capacity(self, model: str) -> bool:
        """Whether a request need not wait. It must then be sent before other tasks run."""
        queue = self._models.get(model)
        if queue is not None and len(queue.for_capacity):
            return False
        num_unsent = queue.num_unsent if queue is not None else 0
        return (self._capacity(model, enough=num_unsent + 1) or 0) > num_unsent

    async def wait_for_capacity(self, model: str, request: QueuedRequest, seconds: float) -> None:
        """Wait until the request may be sent to an engine; settle it when it ends. Raises `Overloaded`,
        `QueueTimeout` and `ShuttingDown`."""
        queue = self._model(model)
        try:
            late = QueueTimeout(f"No engine had room within {seconds:.1f} s.")
            await self._wait(model, queue.for_capacity, request, seconds, late)
        finally:
            if request.unsent:
                request.unsent = False
                queue.num_unsent -= request.num_sequences

    async def wait_for_engine(self, model: str, request: QueuedRequest, seconds: float) -> None:
        """Wait until an engine of the model is up. Raises `Overloaded`, `EngineUnavailable` and `ShuttingDown`."""
        late = EngineUnavailable(f"No engine got ready for the model {model!r} within {seconds:.1f} s.")
        late.retry_after = 5
        await self._wait(model, self._model(model).for_engine, request, seconds, late)

    def add_model(self, model: str) -> None:
        """Export the model's queue depth from now on, although nothing has waited for it yet."""
        if model not in self._models:
            self._report_depth(model)

    def capacity_changed(self) -> None:
        """Admit waiting requests in the event loop's next iteration, after those admitted before have been sent."""
        if not self._scheduled and self._bounds.waiting.total:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._admit_waiting)

    def close(self) -> None:
        """Reject the waiting requests, and all that would wait from now on, with `ShuttingDown`."""
        self._closed = True
        for queue in self._models.values():
            for flow in (*queue.for_capacity.flows, *queue.for_engine.flows):
                for request in flow.requests:
                    request.end_wait(_shutting_down())

    def _model(self, model: str) -> ModelQueue:
        if model not in self._models:
            self._models[model] = ModelQueue(self._bounds.new_queue(), self._bounds.new_queue())
        return self._models[model]

    async def _wait(
        self, model: str, queue: FairQueue, request: QueuedRequest, seconds: float, late: GatewayError
    ) -> None:
        if self._closed:
            raise _shutting_down()
        turn = self._bounds.push(queue, request)
        self._report_depth(model)
        self.capacity_changed()
        started, outcome = time.perf_counter(), "given_up"
        try:
            async with asyncio.timeout(seconds):
                await turn
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
                self._bounds.remove(request)
                request.settle(0)
                self.capacity_changed()  # it may have been admitted just before it was cancelled
            self._report_depth(model)

    def _admit_waiting(self) -> None:
        self._scheduled = False
        for model, queue in self._models.items():
            capacity = self._capacity(model) if len(queue) else None
            if capacity is None:
                continue
            while (request := self._bounds.pop(queue.for_engine)) is not None:
                request.end_wait()
            capacity -= queue.num_unsent
            while capacity > 0 and (request := self._bounds.pop(queue.for_capacity)) is not None:
                if request.end_wait():
                    request.unsent = True
                    queue.num_unsent += request.num_sequences
                    capacity -= request.num_sequences
            self._report_depth(model)

    def _report_depth(self, model: str) -> None:
        depth = len(self._model(model))
        self._metrics.queue_depth.labels(model).set(depth)
        self._demand.set_waiting(model, depth)


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The gateway is shutting down.")
