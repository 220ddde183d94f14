"""Messages between the engine and the worker process of another rank, as `framing` writes them to a connection.

The engine sends Init, Start, a Step for each step, Sample with pipeline stages, Sleep and WakeUp, LoadLora and
UnloadLora, and Shutdown. The worker answers Init with Ready, Start with Started, Sleep and WakeUp with Done, and
LoadLora with LoraRead, while it runs steps. Messages of its mover are passed on in both directions. It sends Failed at
any time before it exits. Either side treats the end of the stream as the other's death.
"""

import msgspec

from proa_engine.config import EngineConfig
from proa_engine.core.types import SchedulerOutput
from proa_engine.framing import FrameReader, Stream
from proa_engine.memory.kv_cache import CacheSizes, WorkerSizes
from proa_engine.mover.messages import FromCore, ToCore


class Init(msgspec.Struct, tag=True, frozen=True):
    """Join the process group at `host` and `port`, and load the model."""

    config: EngineConfig
    generation: int
    host: str
    port: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The answer to Init: the model is loaded."""

    generation: int
    sizes: WorkerSizes


class Start(msgspec.Struct, tag=True, frozen=True):
    """Allocate the KV cache, of sizes that fit on every rank, and warm up."""

    sizes: CacheSizes
    disk_folder: str = ""  # where each rank has a folder; empty: there is no disk


class Started(msgspec.Struct, tag=True, frozen=True):
    """The answer to Start: the worker is warmed up and can run steps."""

    mover_port: int | None = None  # None: its mover, if it has one, serves no other engines


class Step(msgspec.Struct, tag=True, frozen=True):
    """Run one step."""

    scheduler_output: SchedulerOutput


class Sample(msgspec.Struct, tag=True, frozen=True):
    """Sample the oldest step that is not sampled. Sent to ranks of the first of several pipeline stages only; a model's
    only stage samples each step at once."""


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Free the KV cache and weights. The next message is WakeUp or Shutdown."""

    level: int


class WakeUp(msgspec.Struct, tag=True, frozen=True):
    """Undo Sleep: allocate a KV cache and get the weights back."""


class LoadLora(msgspec.Struct, tag=True, frozen=True):
    """Read the adapter at `path` in the worker's file system, while the worker runs steps."""

    lora_id: int
    path: str


class LoraRead(msgspec.Struct, tag=True, frozen=True):
    """The result of LoadLora. `error` is empty on success, otherwise a message for the client."""

    lora_id: int
    digest: str = ""
    error: str = ""
    is_missing: bool = False  # it failed because there is no adapter


class UnloadLora(msgspec.Struct, tag=True, frozen=True):
    """Free an adapter's memory, if it is loaded."""

    lora_id: int


class ToMover(msgspec.Struct, tag=True, frozen=True):
    """Pass a message on to the rank's mover."""

    message: FromCore


class FromMover(msgspec.Struct, tag=True, frozen=True):
    """A message of the rank's mover."""

    message: ToCore


class Done(msgspec.Struct, tag=True, frozen=True):
    """The answer to Sleep and WakeUp."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Exit normally."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker failed and exits."""

    reason: str


ToWorker = Init | Start | Step | Sample | Sleep | WakeUp | LoadLora | UnloadLora | ToMover | Shutdown
ToEngine = Ready | Started | Done | LoraRead | FromMover | Failed


def engine_reader(stream: Stream) -> FrameReader[ToEngine]:
    """Return a reader of a worker's messages, for the engine."""
    return FrameReader(stream, msgspec.msgpack.Decoder(ToEngine))


def worker_reader(stream: Stream) -> FrameReader[ToWorker]:
    """Return a reader of the engine's messages, for a worker."""
    return FrameReader(stream, msgspec.msgpack.Decoder(ToWorker))
