"""Pooled values: bytes of float32 to numbers, and to JSON without holding up the event loop.

orjson takes 85 µs for 1,024 values and holds the interpreter's lock meanwhile, so another thread would not help the
event loop: it gets a turn after every `TURN_VALUES`.
"""

import asyncio
import math
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

import orjson

from proa_gateway.errors import GenerationFailed
from proa_gateway.pooled_output import PooledValues

TURN_VALUES = 8192  # rendered between two turns of the event loop: 0.7 ms


def numbers(values: bytes) -> list[float]:
    """Raises `GenerationFailed` if there is a NaN or an infinity."""
    floats = array("f", values)
    if sys.byteorder == "big":
        floats.byteswap()
    result = floats.tolist()
    if not math.isfinite(sum(result)):
        raise GenerationFailed("the model's values are not finite")
    return result


def float32(values: Iterable[float]) -> bytes:
    """Little-endian."""
    result = array("f", values)
    if sys.byteorder == "big":
        result.byteswap()
    return result.tobytes()


async def vectors(parts: Iterable[bytes]) -> AsyncIterator[list[float]]:
    """The numbers of each part, with turns of the event loop between them. Raises `GenerationFailed` as `numbers`."""
    num_values = 0
    for part in parts:
        vector = numbers(part)
        yield vector
        num_values += len(vector)
        if num_values >= TURN_VALUES:
            num_values = 0
            await asyncio.sleep(0)


async def rows(output: PooledValues) -> list[list[float]]:
    size = len(output.values) // output.num_rows
    parts = (output.values[start : start + size] for start in range(0, len(output.values), size))
    return [row async for row in vectors(parts)]


def float_rows(output: PooledValues, *, as_matrix: bool) -> Iterator[tuple[bytes, int]]:
    """JSON of the values, in parts with the number of values in each. `as_matrix`: a list of rows, even of one."""
    size = len(output.values) // output.num_rows
    if as_matrix:
        yield b"[", 0
    for row in range(output.num_rows):
        data = orjson.dumps(numbers(output.values[row * size : (row + 1) * size]))
        yield b"," + data if row else data, size // 4
    if as_matrix:
        yield b"]", 0


Render = Callable[[PooledValues], Iterable[tuple[bytes, int]]]


async def joined(parts: Iterable[tuple[bytes, int]]) -> bytes:
    """All parts, each with the number of its values, with turns of the event loop between them."""
    done: list[bytes] = []
    num_values = 0
    for part, count in parts:
        done.append(part)
        num_values += count
        if num_values >= TURN_VALUES:
            num_values = 0
            await asyncio.sleep(0)
    return b"".join(done)


async def render_all(outputs: Sequence[PooledValues], head: Callable[[int], bytes], render: Render) -> bytes:
    """The JSON of a list: for each output the object that `head` opens, up to the values that `render` writes."""

    def parts() -> Iterator[tuple[bytes, int]]:
        yield b"[", 0
        for index, output in enumerate(outputs):
            yield b"," + head(index) if index else head(index), 0
            yield from render(output)
            yield b"}", 0
        yield b"]", 0

    return await joined(parts())
