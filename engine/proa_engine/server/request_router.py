"""RequestRouter: who asked for what. It hands requests to the core and the core's outputs back to whoever asked.

Everything here runs on the I/O thread, so nothing is locked. It knows neither gRPC nor protobuf: a client is a `Sink`.
"""

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from proa.contract import EngineCoreOutput, EngineCoreRequest, ModelInfo, SchedulerStats
from proa_engine.core.types import StepOutputs
from proa_engine.server.errors import (
    REJECTIONS,
    Draining,
    EngineError,
    InvalidRequest,
    NoPrefixCache,
    NotReady,
    RequestIdInUse,
    status_code,
)
from proa_engine.server.kv_events import FollowedCore, KvFeed, KvSubscription
from proa_engine.server.observer import RequestObserver


class Core(FollowedCore, Protocol):
    """What the frontend needs of the engine core; every method may be called from any thread."""

    def submit(self, request: EngineCoreRequest) -> None: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def stats(self) -> SchedulerStats: ...

    @property
    def step_started_at(self) -> float | None: ...


class Sink(Protocol):
    """One Session or one Generate call. No method waits."""

    def deliver(self, outputs: Sequence[EngineCoreOutput], timestamp: float, step: int) -> None:
        """Take one step's outputs of its requests, for good."""
        ...

    def reject(self, request_id: str, error: EngineError) -> None: ...

    def drain(self) -> None:
        """Nothing new is admitted."""
        ...

    def fail(self, error: EngineError) -> None:
        """Nothing more will come."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that can take requests. `validate` raises ValueError for what its model cannot do."""

    core: Core
    info: ModelInfo
    tokenizer_files: Sequence[tuple[str, bytes]]
    validate: Callable[[EngineCoreRequest], None]
    observer: RequestObserver
    instance_id: str = field(default_factory=lambda: secrets.token_hex(8))  # drawn at each start of the engine


@dataclass(slots=True)
class _Client:
    sink: Sink
    request_ids: set[str] = field(default_factory=set)


class RequestRouter:
    """States: loading, serving, draining, failed. Before `open` and after `fail` everything is refused."""

    def __init__(self) -> None:
        self._engine: LoadedEngine | None = None
        self._refusal: EngineError | None = NotReady("the model is still loading")
        self._clients: dict[int, _Client] = {}
        self._owners: dict[str, int] = {}  # request_id -> client; kept until the core's last word on the request
        self._num_clients = 0
        self._kv_feed = KvFeed()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def engine(self) -> LoadedEngine:
        """Raises NotReady or EngineDead; a draining engine still answers questions."""
        if self._engine is None:
            assert self._refusal is not None
            raise self._refusal
        return self._engine

    def open(self, engine: LoadedEngine) -> None:
        """The model is loaded."""
        self._engine = engine
        self._refusal = None

    def drain(self) -> None:
        """Nothing new is admitted; what runs goes on."""
        self._refusal = Draining("the engine is shutting down")
        self._kv_feed.fail(self._refusal)
        for client in self._clients.values():
            client.sink.drain()

    def fail(self, error: EngineError) -> None:
        """Nothing is admitted and nothing delivered any more."""
        self._engine, self._refusal = None, error
        self._owners.clear()
        self._idle.set()
        self._kv_feed.fail(error)
        for client in self._clients.values():
            client.sink.fail(error)

    async def wait_until_idle(self) -> None:
        """Until no request is unfinished."""
        await self._idle.wait()

    def attach(self, sink: Sink) -> int:
        """Register a client. Raises EngineError while nothing is admitted."""
        if self._refusal is not None:
            raise self._refusal
        self._num_clients += 1
        self._clients[self._num_clients] = _Client(sink)
        return self._num_clients

    def detach(self, client: int) -> None:
        """The client is gone: abort what it left."""
        self.abort(self._clients.pop(client).request_ids)

    def submit(self, client: int, request: EngineCoreRequest) -> None:
        """Hand the request of an attached client to the core. Raises EngineError."""
        try:
            engine = self._admit(request)
        except EngineError as error:
            if self._engine is not None:
                self._engine.observer.refused(status_code(error).name.lower())
            raise
        self._owners[request.request_id] = client
        self._clients[client].request_ids.add(request.request_id)
        self._idle.clear()
        headers = engine.observer.started(request)
        engine.core.submit(replace(request, client_index=client, trace_headers=headers))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; unknown ids are ignored. Their owners, if still there, get a last output."""
        known = [request_id for request_id in request_ids if request_id in self._owners]
        if known and self._engine is not None:
            self._engine.core.abort(known)

    def deliver(self, outputs: StepOutputs) -> None:
        """Hand a step's outputs to whoever asked. Takes ownership of them."""
        if self._engine is None:  # failed; the step was still on its way
            return
        self._engine.observer.stepped(outputs)
        by_client: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        for output in outputs.outputs:
            by_client[output.client_index].append(output)
            if output.finish_reason is not None:
                self._forget(output.request_id)
        for number, of_client in by_client.items():
            if (client := self._clients.get(number)) is not None:
                client.sink.deliver(of_client, outputs.timestamp, outputs.step)
        if outputs.kv_events is not None:
            self._kv_feed.deliver(outputs.kv_events)
        for rejection in outputs.rejections:
            self._engine.observer.rejected(rejection.request_id, rejection.code, rejection.message)
            if (client := self._clients.get(rejection.client_index)) is not None:
                client.sink.reject(rejection.request_id, REJECTIONS[rejection.code](rejection.message))
            self._forget(rejection.request_id)

    def subscribe_kv_events(self) -> KvSubscription:
        """Follow what the prefix cache holds. Raises EngineError."""
        if self._refusal is not None:
            raise self._refusal
        if not self.engine.info.prefix_caching:
            raise NoPrefixCache("the engine runs without prefix caching")
        return self._kv_feed.subscribe(self.engine.core, self.engine.info.num_gpu_blocks)

    def load(self) -> SchedulerStats:
        """Statistics of this moment; all zero before the model is loaded."""
        if self._engine is None:
            return SchedulerStats()
        stats, started_at = self._engine.core.stats(), self._engine.core.step_started_at
        if started_at is not None:
            stats.last_step_age = max(0.0, time.monotonic() - started_at)
        return stats

    def _admit(self, request: EngineCoreRequest) -> LoadedEngine:
        if self._refusal is not None:
            raise self._refusal
        if request.request_id in self._owners:
            raise RequestIdInUse(f"request_id {request.request_id!r} belongs to an unfinished request")
        engine = self.engine
        try:
            engine.validate(request)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        return engine

    def _forget(self, request_id: str) -> None:
        owner = self._owners.pop(request_id, None)
        client = self._clients.get(owner) if owner is not None else None
        if client is not None:
            client.request_ids.discard(request_id)
        if not self._owners:
            self._idle.set()
