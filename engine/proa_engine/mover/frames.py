"""Frames between movers over TCP: a request for blocks by their hashes, and what answers it.

A request is a header of a fixed size, which has the fingerprint, then the hashes of its chain: a source that refuses
the header reads no hashes. The answer is a sequence of frames, each a header and, for some, their content: the source's
fingerprint; the blocks of table 0 in the order of the chain; then, of one checkpoint, its tails, its state and itself;
then the end. Or one refusal. A connection carries one request.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from io import BufferedReader
from typing import NamedTuple, TypeAlias, overload

from proa_engine.core.kv.mover import MAX_CHAIN, MAX_JOB_MS, MAX_WAIT_MS
from proa_engine.mover.deadline import TimedReader

Reader: TypeAlias = "BufferedReader[TimedReader]"
HASH_BYTES = 16
FINGERPRINT_BYTES = 32
VERSION = 2
_MAGIC = b"PKV1"
_REQUEST_MAGIC = b"PKVR"
_HEADER = struct.Struct("<4sBBHI16sQQ")
# Magic, version, needs_checkpoint, rank, num_ranks, num_blocks, num_held, wait_ms, max_ms, since, fingerprint.
_REQUEST = struct.Struct("<4sBBHHIIIId32s")


class Kind(IntEnum):
    PAGE = 1
    STATE = 2
    CHECKPOINT = 3  # `column`: number of blocks before it
    END = 4
    REFUSED = 5  # `code`: why
    FINGERPRINT = 6  # its content is that of the source


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


class BlocksRequest(NamedTuple):
    """Ask for the blocks of a chain behind the first `num_held`, and for a checkpoint if one is needed."""

    fingerprint: bytes
    rank: int
    num_ranks: int
    num_blocks: int  # of the chain
    num_held: int
    needs_checkpoint: bool
    wait_ms: int  # longest time without a block
    max_ms: int  # longest time of the answer
    since: float  # Unix seconds
    version: int = VERSION


class Chain(Sequence[bytes]):
    """Hashes of blocks, in the memory of their bytes alone: as objects they take four times as much."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return len(self._data) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> "Chain": ...
    def __getitem__(self, index: int | slice) -> "bytes | Chain":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1
            return Chain(self._data[start * HASH_BYTES : max(start, stop) * HASH_BYTES])
        index = range(len(self))[index]  # raises IndexError
        return bytes(self._data[index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        return (bytes(self._data[at : at + HASH_BYTES]) for at in range(0, len(self._data), HASH_BYTES))


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


def encode_request(request: BlocksRequest, chain: Sequence[bytes]) -> bytes:
    """Return the request's header and the chain's hashes."""
    header = _REQUEST.pack(
        _REQUEST_MAGIC,
        request.version,
        request.needs_checkpoint,
        request.rank,
        request.num_ranks,
        request.num_blocks,
        request.num_held,
        request.wait_ms,
        request.max_ms,
        request.since,
        request.fingerprint,
    )
    return header + b"".join(chain)


def read_request(stream: Reader) -> BlocksRequest | None:
    """Return the header of a request, whose chain follows; None at the end of the stream. Raises `BadFrame` for one of
    this version with values that are out of range. Of another version, or of none, only `version` counts."""
    data = stream.read(_REQUEST.size)
    if not data:
        return None
    magic, version, needs_checkpoint, rank, num_ranks, *counts, since, fingerprint = _REQUEST.unpack(
        _whole(data, _REQUEST.size)
    )
    num_blocks, num_held, wait_ms, max_ms = counts
    if magic != _REQUEST_MAGIC:
        version = 0  # before version 2 a request began with its length
    elif version == VERSION:
        if not num_held <= num_blocks <= MAX_CHAIN:
            raise BadFrame(f"a request for {num_blocks} blocks without the first {num_held}")
        if wait_ms > MAX_WAIT_MS or max_ms > MAX_JOB_MS:
            raise BadFrame(f"a request that waits for {wait_ms} ms, and for {max_ms} ms in all")
        if not math.isfinite(since):
            raise BadFrame(f"a request for blocks since {since}")
    return BlocksRequest(
        fingerprint, rank, num_ranks, num_blocks, num_held, bool(needs_checkpoint), wait_ms, max_ms, since, version
    )


def read_chain(stream: Reader, num_blocks: int) -> Chain:
    """Return the hashes that follow a request's header. Raises `BadFrame`."""
    length = num_blocks * HASH_BYTES
    return Chain(_whole(stream.read(length), length))


def read_header(stream: Reader) -> Header:
    """Return the next frame's header. Raises `BadFrame`, also at the end of the stream."""
    magic, *fields = _HEADER.unpack(_whole(stream.read(_HEADER.size), _HEADER.size))
    if magic != _MAGIC:
        raise BadFrame("a frame does not begin as it must")
    return Header(*fields)


def check_fingerprint(stream: Reader, expected: bytes, header: Header) -> None:
    """Read the source's fingerprint. Raises `BadFrame` if it is another one."""
    if header.length != FINGERPRINT_BYTES or _whole(stream.read(header.length), header.length) != expected:
        raise BadFrame(Refusal.FINGERPRINT.sentence)


def read_content(stream: Reader, buffers: Sequence[memoryview], header: Header) -> None:
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
