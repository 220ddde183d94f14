"""Values of float32 in the smaller number formats of `embed_dtype`, rounded to the nearest as torch does."""

import sys
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from proa_gateway.pooling.values import numbers

NumberFormat = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]
FORMATS: tuple[NumberFormat, ...] = get_args(NumberFormat)


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
