"""Numbers of float32 in the formats of `embed_dtype`."""

import math
from array import array
from itertools import pairwise
from struct import pack, unpack

import pytest

from proa_gateway.errors import GenerationFailed
from proa_gateway.pooling.encoder import FORMATS, NumberFormat, is_big_endian, item_size, to_bytes


def encoded(name: NumberFormat, *numbers: float, big_endian: bool = False) -> bytes:
    return to_bytes(pack(f"<{len(numbers)}f", *numbers), name, big_endian=big_endian)


def float8_values(mantissa_bits: int, bias: int, count: int) -> list[float]:
    """Of the codes from 0, as the formats define them."""
    values = []
    for code in range(count):
        exponent, fraction = code >> mantissa_bits, (code % (1 << mantissa_bits)) / (1 << mantissa_bits)
        values.append(math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias))
    return values


@pytest.mark.parametrize(
    ("name", "values", "largest"),
    [("fp8_e4m3", float8_values(3, 7, 127), 126), ("fp8_e5m2", float8_values(2, 15, 124), 124)],
)
def test_float8_is_the_nearest_number_and_the_even_one_of_two(
    name: NumberFormat, values: list[float], largest: int
) -> None:
    assert list(encoded(name, *values)) == list(range(len(values)))
    assert list(encoded(name, *(-value for value in values))) == [code | 0x80 for code in range(len(values))]
    for code, (lower, upper) in enumerate(pairwise(values)):
        middle, step = (lower + upper) / 2, (upper - lower) / 1024
        even = code if code % 2 == 0 else code + 1
        assert list(encoded(name, middle - step, middle, middle + step)) == [code, even, code + 1]
    assert list(encoded(name, 1e30, -1e30)) == [largest, largest | 0x80]


def test_float16_is_infinite_where_its_numbers_end() -> None:
    assert unpack("<4e", encoded("float16", 1.0, -65504.0, 65519.0, 0.1)) == (
        1.0,
        -65504.0,
        65504.0,
        unpack("<e", pack("<e", 0.1))[0],
    )
    assert unpack("<2e", encoded("float16", 65520.0, -1e30)) == (math.inf, -math.inf)


def test_bfloat16_is_the_upper_half_rounded_to_even() -> None:
    bits = {0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81, 0xBF817FFF: 0xBF81, 0x7F7FFFFF: 0x7F80}
    values = array("I", bits).tobytes()
    assert list(unpack(f"<{len(bits)}H", to_bytes(values, "bfloat16", big_endian=False))) == list(bits.values())


@pytest.mark.parametrize("name", FORMATS)
def test_big_endian_numbers_have_their_bytes_reversed(name: NumberFormat) -> None:
    size = item_size(name)
    little, big = (encoded(name, 1.5, -0.3, big_endian=big_endian) for big_endian in (False, True))
    assert big == b"".join(little[start : start + size][::-1] for start in (0, size))
    assert (is_big_endian("big"), is_big_endian("little"), is_big_endian(None)) == (True, False, False)


@pytest.mark.parametrize("name", FORMATS[1:])
def test_values_that_are_not_finite_are_an_error(name: NumberFormat) -> None:
    with pytest.raises(GenerationFailed):
        encoded(name, 1.0, math.nan)
