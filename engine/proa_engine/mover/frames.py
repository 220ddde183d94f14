"""Frames between movers over TCP: a request for blocks by their hashes, and what answers it.

A request is a little-endian uint32 of its length, then msgpack. The answer is a sequence of frames, each a header and,
for pages and states, their content: the blocks of table 0 in the order of the chain; then, of one checkpoint, its
tails, its state and itself; then the end. Or one refusal. A connection carries one request at a time.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from io import BufferedReader
from socket import SocketIO
from typing import NamedTuple

import msgspec

HASH_BYTES = 16
MAX_REQUEST_BYTES = 1 << 24  # a chain of a million blocks
VERSION = 1
_MAGIC = b"PKV1"
_HEADER = struct.Struct("<4sBBHI16sQQ")
_LENGTH = struct.Struct("<I")


class Kind(IntEnum):
    PAGE = 1
    STATE = 2
    CHECKPOINT = 3  # `column`: number of blocks before it
    END = 4
    REFUSED = 5  # `code`: why


class Refusal(IntEnum):
    """Why a source serves nothing."""

    VERSION = 1
    FINGERPRINT = 2
    RANK = 3
    RESET = 4  # it may have blocks from before the time that the request names
    BUSY = 5

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Refusal.VERSION: "the source speaks another version of the protocol",
    Refusal.FINGERPRINT: "the source has another model, cache layout or configuration",
    Refusal.RANK: "the address is of another rank, or the source has another number of ranks",
    Refusal.RESET: "the source was not reset when this engine was",
    Refusal.BUSY: "the source serves as many connections as it can",
}


class BlocksRequest(msgspec.Struct, frozen=True):
    """Ask for the blocks of `chain` behind the first `num_held`, and for a checkpoint if one is needed."""

    fingerprint: bytes
    rank: int
    num_ranks: int
    chain: bytes  # hashes, one after the other
    num_held: int
    needs_checkpoint: bool
    wait_ms: int  # longest time without a block
    since: float  # Unix seconds
    version: int = VERSION

    @property
    def hashes(self) -> list[bytes]:
        return [self.chain[start : start + HASH_BYTES] for start in range(0, len(self.chain), HASH_BYTES)]


class Header(NamedTuple):
    kind: int
    table: int = 0  # of a page
    code: int = 0
    column: int = 0  # of a page of table 0: its place in the chain; of a tail: blocks between it and the checkpoint
    block_hash: bytes = bytes(HASH_BYTES)
    checksum: int = 0  # xxh3 of the content
    length: int = 0  # of the content

    def encode(self) -> bytes:
        return _HEADER.pack(_MAGIC, *self)


class BadFrame(ValueError):
    """The peer sent something else than the protocol allows."""


def encode_request(request: BlocksRequest) -> bytes:
    payload = msgspec.msgpack.encode(request)
    return _LENGTH.pack(len(payload)) + payload


def read_request(stream: "BufferedReader[SocketIO]") -> BlocksRequest | None:
    """Return the next request; None at the end of the stream. Raises `BadFrame`."""
    prefix = stream.read(_LENGTH.size)
    if not prefix:
        return None
    (length,) = _LENGTH.unpack(_whole(prefix, _LENGTH.size))
    if length > MAX_REQUEST_BYTES:
        raise BadFrame(f"a request of {length} bytes is too long")
    try:
        return msgspec.msgpack.decode(_whole(stream.read(length), length), type=BlocksRequest)
    except msgspec.MsgspecError as error:
        raise BadFrame(str(error)) from None


def read_header(stream: "BufferedReader[SocketIO]") -> Header:
    """Return the next frame's header. Raises `BadFrame`, also at the end of the stream."""
    magic, *fields = _HEADER.unpack(_whole(stream.read(_HEADER.size), _HEADER.size))
    if magic != _MAGIC:
        raise BadFrame("a frame does not begin as it must")
    return Header(*fields)


def read_content(stream: "BufferedReader[SocketIO]", buffers: Sequence[memoryview], header: Header) -> None:
    """Read a frame's content into `buffers`. Raises `BadFrame`."""
    if header.length != sum(map(len, buffers)):
        raise BadFrame(f"a unit of {header.length} bytes does not fit this engine's cache")
    for buffer in buffers:
        if stream.readinto(buffer) != len(buffer):
            raise BadFrame("the source closed the connection")


def _whole(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise BadFrame("the peer closed the connection")
    return data
