"""Frames of messages between the engine's processes: a little-endian uint32 of the payload's length, then msgpack."""

import socket
import struct
from typing import Generic, TypeVar

import msgspec

_HEADER = struct.Struct("<I")
T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """Return the frame of a message."""
    payload = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(payload)) + payload


class FrameReader(Generic[T]):
    """Reads frames of one type from a blocking socket."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._file = sock.makefile("rb")
        self._decoder = decoder

    def close(self) -> None:
        """Release the socket, which is not closed before this."""
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
