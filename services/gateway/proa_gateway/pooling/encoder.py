"""ValueEncoder: pooled values as bytes or base64, in the number format and byte order that the client asks for."""

import asyncio
import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any, Final

from proa_gateway.pooled_output import PooledValues
from proa_gateway.pooling.handler import Envelope
from proa_gateway.pooling.number_formats import Endianness, NumberFormat, is_big_endian, item_size, to_bytes
from proa_gateway.pooling.values import joined
from proa_gateway.streaming import Content

MAX_DESCRIBED: Final = 256
"""Inputs whose places in the bytes a header names: 140 bytes each, and clients take headers of up to 64 KiB."""
_CONVERTED: Final = 1 << 18  # bytes of float32 that are converted at a time: bounds numpy's intermediate arrays to 1 MB
_PIECE: Final = 3 << 14  # bytes that are copied, or written as base64, at a time: 50 µs. Base64 needs a multiple of 3
_VALUES_OF_A_BYTE: Final = 1 / 128  # numbers in JSON that take as long
_BYTES: Final = b"application/octet-stream"


class ValueEncoder:
    """`has_rows`: each output is a matrix, even one of a single row."""

    def __init__(self, number_format: NumberFormat, endianness: Endianness, has_rows: bool) -> None:
        self._format = number_format
        self._endianness = endianness
        self._has_rows = has_rows

    async def encode(self, outputs: Sequence[PooledValues]) -> list[bytes]:
        """The bytes of each output. Raises `GenerationFailed` for a NaN or an infinity, except in float32."""
        big_endian = is_big_endian(self._endianness)
        if self._format == "float32" and not big_endian:
            return [output.values for output in outputs]
        return await asyncio.to_thread(lambda: [self._converted(each.values, big_endian) for each in outputs])

    async def binary(self, outputs: Sequence[PooledValues], envelope: Envelope, *, is_described: bool) -> Content:
        """All values, one output behind the other. `is_described`: with vLLM's header `metadata`."""
        body = await joined(piece for data in await self.encode(outputs) for piece in _pieces(data))
        if not is_described:
            return Content(body, _BYTES)
        metadata = envelope.fields | {"data": list(self._places(outputs)), "usage": envelope.usage.to_dict()}
        return Content(body, _BYTES, ((b"metadata", json.dumps(metadata).encode("ascii")),))

    def _places(self, outputs: Sequence[PooledValues]) -> Iterator[dict[str, Any]]:
        start = 0
        for index, output in enumerate(outputs):
            num_values = len(output.values) // 4
            shape = [output.num_rows, num_values // output.num_rows] if self._has_rows else [num_values]
            end = start + num_values * item_size(self._format)
            place = {"start": start, "end": end, "shape": shape}
            yield {"index": index, "embed_dtype": self._format, "endianness": self._endianness, **place}
            start = end

    def _converted(self, values: bytes, big_endian: bool) -> bytes:
        starts = range(0, len(values), _CONVERTED)
        parts = (values[start : start + _CONVERTED] for start in starts)
        return b"".join(to_bytes(part, self._format, big_endian=big_endian) for part in parts)


def base64_text(data: bytes) -> Iterator[tuple[bytes, int]]:
    """A string in JSON, in parts, each with the number of values in JSON that take as long."""
    yield b'"', 0
    for piece, cost in _pieces(data):
        yield b64encode(piece), cost
    yield b'"', 0


def _pieces(data: bytes) -> Iterator[tuple[bytes, int]]:
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        yield piece, int(len(piece) * _VALUES_OF_A_BYTE)
