"""Pooled values: bytes of float32 to numbers, and to JSON without holding up the event loop.

Arithmetic on values is numpy's, in a thread: numpy releases the interpreter's lock. orjson does not, and takes 85 µs
for 1,024 values, so another thread would not help the event loop: it gets a turn after every `TURN_VALUES`.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from proa_gateway.errors import GenerationFailed
from proa_gateway.output.pooled import PooledOutput, PooledValues
from proa_gateway.pooling.inputs import PooledInput

TURN_VALUES = 8192  # rendered between two turns of the event loop: 0.7 ms
_NORM_TOLERANCE = 1e-2  # of length 1, in engines that compute with bfloat16


def numbers(values: bytes, num_rows: int | None = None) -> NDArray[np.float32]:
    """A vector, or a matrix of `num_rows`, over the memory of `values`. Raises `GenerationFailed` if there is a NaN or
    an infinity."""
    floats = np.frombuffer(values, "<f4")
    if not np.isfinite(floats).all():
        raise GenerationFailed("the model's values are not finite")
    return floats if num_rows is None else floats.reshape(num_rows, -1)


def matrix(output: PooledValues) -> NDArray[np.float32]:
    """Raises `GenerationFailed` as `numbers`."""
    return numbers(output.values, output.num_rows)


def float32(values: NDArray[np.float64]) -> bytes:
    """Little-endian."""
    return values.astype("<f4").tobytes()


def float_rows(output: PooledValues, *, as_matrix: bool) -> Iterator[tuple[bytes, int]]:
    """JSON of the values, in parts with the number of values in each. `as_matrix`: a list of rows, even of one."""
    size = len(output.values) // output.num_rows
    if as_matrix:
        yield b"[", 0
    for row in range(output.num_rows):
        data = orjson.dumps(numbers(output.values[row * size : (row + 1) * size]).tolist())
        yield b"," + data if row else data, size // 4
    if as_matrix:
        yield b"]", 0


Output = TypeVar("Output")


async def joined(parts: Iterable[tuple[bytes, int]]) -> bytes:
    """Join all parts, each given with the number of its values, with turns of the event loop between them."""
    done: list[bytes] = []
    num_values = 0
    for part, count in parts:
        done.append(part)
        num_values += count
        if num_values >= TURN_VALUES:
            num_values = 0
            await asyncio.sleep(0)
    return b"".join(done)


async def render_all(
    outputs: Sequence[Output], head: Callable[[int], bytes], render: Callable[[Output], Iterable[tuple[bytes, int]]]
) -> bytes:
    """The JSON of a list: for each output the object that `head` opens, up to the values that `render` writes."""

    def parts() -> Iterator[tuple[bytes, int]]:
        yield b"[", 0
        for index, output in enumerate(outputs):
            yield b"," + head(index) if index else head(index), 0
            yield from render(output)
            yield b"}", 0
        yield b"]", 0

    return await joined(parts())


async def combine(divided: Sequence[Sequence[PooledInput]], outputs: Sequence[PooledOutput]) -> list[PooledValues]:
    """The values of each input. `outputs` are those of all parts, in order."""
    rest: Iterator[PooledOutput] = iter(outputs)
    results = []
    for parts in divided:
        own = [next(rest) for _ in parts]
        if len(parts) == 1:
            results.append(PooledValues(own[0].values, own[0].num_rows))
        else:
            weights = [len(part.token_ids) for part in parts]
            results.append(await asyncio.to_thread(mean_embedding, own, weights))
    return results


def mean_embedding(parts: Sequence[PooledOutput], weights: Sequence[int]) -> PooledValues:
    """The weighted mean of embeddings. It has length 1 if all of them have."""
    sums, are_normalized = np.zeros(len(parts[0].values) // 4), True
    for part, weight in zip(parts, weights, strict=True):
        vector = numbers(part.values).astype(np.float64)
        are_normalized = are_normalized and bool(abs(np.linalg.norm(vector) - 1.0) <= _NORM_TOLERANCE)
        sums += weight * vector
    divisor = np.linalg.norm(sums) if are_normalized else sum(weights)
    return PooledValues(float32(sums / (divisor or 1.0)), 1)
