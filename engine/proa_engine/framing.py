"""Frames of messages between the engine's processes: a little-endian uint32 of the payload's length, then msgpack."""

import struct
from io import BufferedReader
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

_HEADER = struct.Struct("<I")
T = TypeVar("T")


class Stream(Protocol):
    """A connection that carries frames: a blocking socket, or what behaves like one."""

    def makefile(self, mode: Literal["rb"], /) -> BufferedReader: ...

    def recv(self, size: int, /) -> bytes: ...

    def sendall(self, data: bytes, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame of a message."""
    payload = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(payload)) + payload


def receive(stream: Stream, decoder: msgspec.msgpack.Decoder[T], *, max_bytes: int) -> T:
    """Read one message of a peer that is not trusted yet, and nothing after it.

    Raises `ConnectionError` at the end of the stream, and `ValueError` for what is no message, or a longer one.
    """
    (length,) = _HEADER.unpack(_receive_exactly(stream, _HEADER.size))
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes, at most {max_bytes} are expected")
    try:
        return decoder.decode(_receive_exactly(stream, length))
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


class FrameReader(Generic[T]):
    """Reads frames of one type from a connection."""

    def __init__(self, stream: Stream, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._file = stream.makefile("rb")
        self._decoder = decoder

    def close(self) -> None:
        """Release the connection, which is not closed before this."""
        self._file.close()

    def read(self) -> T | None:
        """Return the next message; None at the end of the stream, even within a frame."""
        try:
            header = self._file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return None
            (length,) = _HEADER.unpack(header)
            payload = self._file.read(length)
        except ConnectionResetError:  # the peer ended with messages that it had not read
            return None
        return self._decoder.decode(payload) if len(payload) == length else None


def _receive_exactly(stream: Stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := stream.recv(size - len(data))):
            raise ConnectionError("the connection was closed")
        data += part
    return data
