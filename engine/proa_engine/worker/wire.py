"""What crosses the socket between the engine and a worker of another rank: length-prefixed msgpack, no pickle.

The engine sends Init, Start, then one Step for each step, then Shutdown; the worker answers Init with Ready and Start
with Started, and may say Failed at any time. End of file is death, either way.
"""

import socket
import struct
from typing import Generic, TypeVar

import msgspec

from proa_engine.config import EngineConfig
from proa_engine.core.types import SchedulerOutput
from proa_engine.worker.worker import WorkerSizes

_HEADER = struct.Struct("<I")
T = TypeVar("T")


class Init(msgspec.Struct, tag=True, frozen=True):
    """Load the model and meet the other ranks at `port`."""

    config: EngineConfig
    generation: int
    port: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    generation: int
    sizes: WorkerSizes


class Start(msgspec.Struct, tag=True, frozen=True):
    """Allocate the KV cache: the least that any rank has room for."""

    num_blocks: int


class Started(msgspec.Struct, tag=True, frozen=True):
    """Warmed up; steps may come."""


class Step(msgspec.Struct, tag=True, frozen=True):
    """Run one step: forward and sampling."""

    plan: SchedulerOutput


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Leave; nothing went wrong."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker leaves because of this."""

    reason: str


ToWorker = Init | Start | Step | Shutdown
ToEngine = Ready | Started | Failed


def encode(message: ToWorker | ToEngine) -> bytes:
    """A whole frame: the payload's length, little-endian uint32, and the payload."""
    payload = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(payload)) + payload


class FrameReader(Generic[T]):
    """Reads frames of one type from a blocking socket."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._file = sock.makefile("rb")
        self._decoder = decoder

    def read(self) -> T | None:
        """The next message; None at the end of the file, also in the middle of a frame."""
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack(header)
        payload = self._file.read(length)
        return self._decoder.decode(payload) if len(payload) == length else None


def engine_reader(sock: socket.socket) -> FrameReader[ToEngine]:
    """What the engine reads."""
    return FrameReader(sock, msgspec.msgpack.Decoder(ToEngine))


def worker_reader(sock: socket.socket) -> FrameReader[ToWorker]:
    """What a worker reads."""
    return FrameReader(sock, msgspec.msgpack.Decoder(ToWorker))
