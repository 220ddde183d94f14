"""Calls to the core that are no requests: reset the prefix cache, sleep, wake up, load and unload adapters."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from proa.contract import Lora

SleepLevel = Literal[1, 2]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """A call that the core runs on its thread, between two steps. `done` gets its result."""

    done: "Future[T]" = field(default_factory=Future, kw_only=True)


@dataclass(frozen=True, slots=True)
class ResetPrefixCache(Operation[None]):
    """Empty the prefix cache, as after a change of weights. Blocks from before `since`, in Unix seconds, are not
    fetched from other engines either; 0: now."""

    since: float = 0.0


@dataclass(frozen=True, slots=True)
class EndStream(Operation[None]):
    """Retain no blocks any more for a stream, whose requests are aborted. Of the server, not of an operator."""

    client_index: int


@dataclass(frozen=True, slots=True)
class Sleep(Operation[None]):
    """Free the executor's memory when no request is unfinished; unfinished ones are aborted unless `wait`.

    Done when the executor sleeps, or when a later `WakeUp` has cancelled the call. An engine that sleeps already keeps
    its level. `since`: see `ResetPrefixCache`, which level 2 includes; 0: when it falls asleep.
    """

    level: SleepLevel
    wait: bool = False
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class WakeUp(Operation[None]):
    """End `Sleep`. Done when requests are accepted again."""


@dataclass(frozen=True, slots=True)
class LoadLora(Operation[Lora]):
    """Load an adapter from a folder of the engine's file system, beside running requests.

    Done when requests may name it; the result is the loaded adapter. If an adapter with the same content is loaded
    under this name, it is returned. With `replace`, an adapter with other content loses the name, and its requests
    continue. If `max_cpu_loras` are loaded, the least recently used one without requests is unloaded.

    `done` fails with `LoraNotFound`, `LoraInvalid`, `LoraExists` or `TooManyLoras`, or with `ExecutorFailed`.
    """

    name: str
    path: str
    replace: bool = False


@dataclass(frozen=True, slots=True)
class UnloadLora(Operation[None]):
    """Unload an adapter, so that new requests for it are rejected. Done at once.

    Its memory is freed when its last request has ended. `done` fails with `LoraNotFound`.
    """

    name: str
