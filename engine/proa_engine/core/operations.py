"""Operators' calls to the core: empty the prefix cache, sleep, wake up, load and unload adapters."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from proa.contract import Lora

SleepLevel = Literal[1, 2]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """A call that the core begins on its thread, between two steps. `done` gets its result."""

    done: "Future[T]" = field(default_factory=Future, kw_only=True)


@dataclass(frozen=True, slots=True)
class ResetPrefixCache(Operation[None]):
    """Empty the prefix cache, as after a change of weights."""


@dataclass(frozen=True, slots=True)
class Sleep(Operation[None]):
    """Free the executor's memory when no request is unfinished; unfinished ones are aborted unless `wait`.

    Done when the executor sleeps, or when a later `WakeUp` has cancelled that. An engine that sleeps already stays at
    its level.
    """

    level: SleepLevel
    wait: bool = False


@dataclass(frozen=True, slots=True)
class WakeUp(Operation[None]):
    """End `Sleep`. Done when requests are accepted again."""


@dataclass(frozen=True, slots=True)
class LoadLora(Operation[Lora]):
    """Load an adapter from a folder of the engine's file system, beside running requests.

    Done when requests may name it; the result is the loaded adapter. One that is loaded already under this name, with
    the same content, stays as it is. With `replace` it takes the name from an adapter of another content, whose
    requests go on. If `max_cpu_loras` are loaded, the least recently used one without requests is unloaded.

    `done` fails with `LoraNotFound`, `LoraInvalid`, `LoraExists` or `TooManyLoras`; `ExecutorFailed` as any step.
    """

    name: str
    path: str
    replace: bool = False


@dataclass(frozen=True, slots=True)
class UnloadLora(Operation[None]):
    """Take an adapter's name, so that new requests for it are rejected. Done at once.

    Its memory is freed when its last request has ended. `done` fails with `LoraNotFound`.
    """

    name: str
