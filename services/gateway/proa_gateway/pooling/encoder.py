"""ValueEncoder: pooled values as bytes or base64, in the number format and byte order that the client asks for."""

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
_PIECE: Final = 3 * 512  # numbers between two turns of the event loop: a multiple of what base64 takes at a time
_BYTES: Final = b"application/octet-stream"


class ValueEncoder:
    """`has_rows`: each output is a matrix, even one of a single row."""

    def __init__(self, number_format: NumberFormat, endianness: Endianness, has_rows: bool) -> None:
        self._format = number_format
        self._endianness = endianness
        self._has_rows = has_rows
        # float32 is copied; the others take three times as long as a number in JSON.
        self._cost_factor = 1 / 64 if number_format == "float32" else 3

    def base64_text(self, output: PooledValues) -> Iterator[tuple[bytes, int]]:
        yield b'"', 0
        for piece, cost in self._pieces(output):
            yield b64encode(piece), cost
        yield b'"', 0

    async def binary(self, outputs: Sequence[PooledValues], envelope: Envelope, *, is_described: bool) -> Content:
        """All values, one output behind the other. `is_described`: with vLLM's header `metadata`."""
        body = await joined(piece for output in outputs for piece in self._pieces(output))
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

    def _pieces(self, output: PooledValues) -> Iterator[tuple[bytes, int]]:
        big_endian = is_big_endian(self._endianness)
        for start in range(0, len(output.values), 4 * _PIECE):
            values = output.values[start : start + 4 * _PIECE]
            yield to_bytes(values, self._format, big_endian=big_endian), int(len(values) / 4 * self._cost_factor)
