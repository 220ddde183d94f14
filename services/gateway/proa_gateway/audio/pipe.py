"""The messages between the gateway and the processes that decode audio.

The gateway has one program and asks it to fork a process for each file: by `FORK`, with the end of a socket that
becomes the process's, and by `END`, which kills it. The program sends `READY` once, when it has started.

A process sends `READY` with its number, reads a `DecodeRequest` and the file, then answers each `NEXT` by one reply:
the head with its kind and size, then so many bytes.
"""

import struct
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Final, Self

MAX_TEXT: Final = 1000  # bytes of the reason in a reply
NEXT: Final = b"n"  # the command that asks for the file's next window
NUMBER_SIZE: Final = 8  # bytes of a number in a payload
_CONTROL = struct.Struct("<cQ")
_HEAD = struct.Struct("<c?Q")
_REQUEST = struct.Struct("<5Q")
CONTROL_SIZE: Final = _CONTROL.size
HEAD_SIZE: Final = _HEAD.size
REQUEST_SIZE: Final = _REQUEST.size


class Control(Enum):
    """What the gateway sends the program, with the number of a process."""

    FORK = b"f"
    END = b"e"


class Kind(Enum):
    READY = b"k"
    WINDOW = b"w"  # samples, float32 in little-endian order
    SILENCE = b"s"  # a window without sound: the number of its samples
    REFUSED = b"r"  # a reason for the client
    EXHAUSTED = b"m"  # the file needs more memory than the process may have


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    num_bytes: int  # of the file
    sampling_rate: int  # of the windows, in samples a second
    max_window: int  # samples
    max_samples: int  # of the file's audio
    cpu_seconds: int  # after which the process ends, as one whose gateway no longer watches it must

    def pack(self) -> bytes:
        return _REQUEST.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(**dict(zip(cls.__dataclass_fields__, _REQUEST.unpack(data), strict=True)))


@dataclass(frozen=True, slots=True)
class Head:
    kind: Kind
    is_last: bool  # of a file's windows
    size: int

    def pack(self) -> bytes:
        return _HEAD.pack(self.kind.value, self.is_last, self.size)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Raises `ValueError` for a kind that does not exist."""
        kind, is_last, size = _HEAD.unpack(data)
        return cls(Kind(kind), is_last, size)


def pack_control(control: Control, pid: int = 0) -> bytes:
    return _CONTROL.pack(control.value, pid)


def unpack_control(data: bytes) -> tuple[Control, int]:
    value, pid = _CONTROL.unpack(data)
    return Control(value), pid


def pack_number(number: int) -> bytes:
    return number.to_bytes(NUMBER_SIZE, "little")


def unpack_number(data: bytes) -> int:
    return int.from_bytes(data, "little")
