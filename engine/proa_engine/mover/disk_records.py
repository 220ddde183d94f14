"""Records of a segment's index file: what its data file has, and where.

A record is its length and checksum, little-endian, then msgpack. So records behind a torn or damaged one are not read,
and those before it are.
"""

import struct
from collections.abc import Iterator

import msgspec
from xxhash import xxh3_64_intdigest

MAGIC = b"PROAKV1\n"  # at the beginning of an index file
_HEADER = struct.Struct("<IQ")  # bytes of the payload, and its xxh3


class UnitRecord(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """A page or a state in the data file."""

    table: int  # or `STATE`
    block_hash: bytes
    offset: int
    length: int
    checksum: int  # xxh3 of the content


class CheckpointRecord(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """A checkpoint, all of whose units were written before it, to any segment."""

    block_hash: bytes
    tails: tuple[tuple[bytes, ...], ...] = ()  # hashes of its blocks in each table with a window, in order
    has_state: bool = False


Record = UnitRecord | CheckpointRecord
_DECODER = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return _HEADER.pack(len(payload), xxh3_64_intdigest(payload)) + payload


def decode_records(data: bytes) -> Iterator[Record]:
    """Yield the records of an index file up to its end, or to the first one that is not whole."""
    offset = len(MAGIC)
    if not data.startswith(MAGIC):
        return
    while offset + _HEADER.size <= len(data):
        length, checksum = _HEADER.unpack_from(data, offset)
        start = offset + _HEADER.size
        offset = start + length
        payload = data[start:offset]
        if len(payload) != length or xxh3_64_intdigest(payload) != checksum:
            return
        try:
            yield _DECODER.decode(payload)
        except msgspec.MsgspecError:
            return
