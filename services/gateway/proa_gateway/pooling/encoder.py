"""Pooled values as bytes or base64, in the number format and byte order that the client asks for.

Numbers are rounded to the nearest as torch does.
"""

import asyncio
import json
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from proa_gateway.http.streaming import Content
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.values import joined, numbers
from proa_gateway.serving.choices import Usage

NumberFormat = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
FORMATS: tuple[NumberFormat, ...] = get_args(NumberFormat)
MAX_DESCRIBED: Final = 256
"""Inputs whose places in the bytes a header names: 140 bytes each, and clients take headers of up to 64 KiB."""
_CONVERTED: Final = 1 << 18  # bytes of float32 that are converted at a time: bounds numpy's intermediate arrays to 1 MB
_PIECE: Final = 3 << 14  # bytes that are copied, or written as base64, at a time: 50 µs. Base64 needs a multiple of 3
_VALUES_OF_A_BYTE: Final = 1 / 128  # numbers in JSON that take as long
_BYTES: Final = b"application/octet-stream"


def to_bytes(values: bytes, name: NumberFormat, *, big_endian: bool) -> bytes:
    """`values` are little-endian float32. Raises `GenerationFailed` for a NaN or an infinity, except in float32."""
    encoded = _ENCODERS[name](values)
    size = item_size(name)
    return _swapped(encoded, size) if big_endian and size > 1 else encoded


def item_size(name: NumberFormat) -> int:
    """Bytes of a number."""
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(name, 1)


def is_big_endian(endianness: Endianness | None) -> bool:
    """Little-endian unless the client asks for something else. `native` is the gateway's own order."""
    return endianness == "big" or (endianness == "native" and sys.byteorder == "big")


def _swapped(data: bytes, size: int) -> bytes:
    return np.frombuffer(data, f"u{size}").byteswap().tobytes()


def _float16(values: bytes) -> bytes:
    with np.errstate(over="ignore"):  # from 65,520, float16 is infinite
        return numbers(values).astype("<f2").tobytes()


def _bfloat16(values: bytes) -> bytes:
    """The upper halves of the numbers, rounded to the even one between two."""
    words = numbers(values).view("<u4")  # without a NaN, which rounding would change
    rounded: NDArray[np.uint32] = (words + 0x7FFF + (words >> 16 & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def _float8(mantissa_bits: int, bias: int, last: int) -> Callable[[bytes], bytes]:
    """A format of a sign, an exponent and `mantissa_bits`. `last`: the code of all numbers that are too large for
    another: infinity, or the largest number of a format without infinities."""

    def value(code: int) -> float:
        exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
        if not exponent:
            return mantissa * 2.0 ** (1 - bias - mantissa_bits)
        return ((1 << mantissa_bits) + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)

    middles = [(value(code) + value(code + 1)) / 2 for code in range(last)]
    # A number in the middle gets the even code. float32 has no number between a middle and a bit more than it.
    starts = np.array([middle if code % 2 else middle * (1 + 2.0**-40) for code, middle in enumerate(middles)])

    def encode(values: bytes) -> bytes:
        floats = numbers(values)
        codes = np.searchsorted(starts, np.abs(floats).astype(np.float64), side="right").astype(np.uint8)
        signs: NDArray[np.uint8] = floats.view(np.uint8)[3::4] & np.uint8(0x80)
        return (codes | signs).tobytes()

    return encode


_ENCODERS: Mapping[NumberFormat, Callable[[bytes], bytes]] = {
    "float32": lambda values: values,
    "float16": _float16,
    "bfloat16": _bfloat16,
    "fp8_e4m3": _float8(mantissa_bits=3, bias=7, last=126),
    "fp8_e5m2": _float8(mantissa_bits=2, bias=15, last=124),
}


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

    async def binary(
        self, outputs: Sequence[PooledValues], fields: Mapping[str, object], usage: Usage, *, is_described: bool
    ) -> Content:
        """Return all values, one output after the other. `is_described`: with vLLM's header `metadata`, which also has
        `fields` and `usage`."""
        body = await joined(piece for data in await self.encode(outputs) for piece in _pieces(data))
        if not is_described:
            return Content(body, _BYTES)
        metadata = {**fields, "data": list(self._places(outputs)), "usage": usage.to_dict()}
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
