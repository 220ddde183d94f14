"""LoadedEngine: what the server needs of an engine once its model is loaded."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from proa.contract import EngineCoreRequest, LoadedLoras, ModelInfo, SchedulerStats
from proa_engine.config import EngineConfig
from proa_engine.core.operations import Operation
from proa_engine.server.kv_events import KvEventSource
from proa_engine.server.observer import RequestObserver

T = TypeVar("T")


class Core(KvEventSource, Protocol):
    """The part of `EngineCore` that the router calls. Every method is thread-safe."""

    def submit(self, request: EngineCoreRequest) -> None: ...

    def abort(self, request_ids: Iterable[str]) -> None: ...

    def operate(self, operation: Operation[T]) -> "Future[T]": ...

    def stats(self) -> SchedulerStats: ...

    @property
    def step_started_at(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that can take requests. `validate` raises ValueError for a request that its model cannot serve."""

    core: Core
    info: ModelInfo
    config: EngineConfig
    tokenizer_files: Sequence[tuple[str, bytes]]
    validate: Callable[[EngineCoreRequest], None]
    observer: RequestObserver
    loras: LoadedLoras = field(default_factory=LoadedLoras)  # loaded before the first step
    instance_id: str = field(default_factory=lambda: secrets.token_hex(8))  # new at each start of the engine
