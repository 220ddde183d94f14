"""The messages between the gateway and a process that decodes audio.

The gateway sends a command of one byte: `FILE`, followed by a `DecodeRequest` and the file; `NEXT`, which asks for the
file's next window; `CLOSE`, which ends a file before its last window. Each `NEXT` is answered by one reply: the head
with its kind and size, then so many bytes. A process replies `READY` once, when it has started.
"""

import struct
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Final, Self

MAX_TEXT: Final = 1000  # bytes of the reason in a reply
_HEAD = struct.Struct("<cQ")
_REQUEST = struct.Struct("<5Q")
HEAD_SIZE: Final = _HEAD.size
REQUEST_SIZE: Final = _REQUEST.size


class Command(Enum):
    FILE = b"f"
    NEXT = b"n"
    CLOSE = b"c"


class Kind(Enum):
    READY = b"k"
    WINDOW = b"w"  # samples, float32 in little-endian order
    SILENCE = b"s"  # a window without sound: the number of its samples in 8 bytes
    END = b"e"  # there are no more windows; the file is closed
    REFUSED = b"r"  # a reason for the client; the file is closed
    EXHAUSTED = b"m"  # the file needs more memory than the process may have; the process ends


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    num_bytes: int  # of the file
    sampling_rate: int  # of the windows, in samples a second
    max_window: int  # samples
    max_seconds: int  # of the file's audio
    cpu_seconds: int  # after which the process ends, as one whose gateway no longer watches it must

    def pack(self) -> bytes:
        return _REQUEST.pack(*astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        return cls(**dict(zip(cls.__dataclass_fields__, _REQUEST.unpack(data), strict=True)))


def pack_head(kind: Kind, size: int) -> bytes:
    return _HEAD.pack(kind.value, size)


def unpack_head(data: bytes) -> tuple[Kind, int]:
    """Raises `ValueError` for a kind that does not exist."""
    kind, size = _HEAD.unpack(data)
    return Kind(kind), size
