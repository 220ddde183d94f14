"""Embeddings of inputs that are longer than the model's context: the mean of the embeddings of their parts."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from proa.contract import ModelInfo, PoolingTask
from proa_gateway.pooled_output import PooledOutput, PooledValues
from proa_gateway.pooling.inputs import PooledInput
from proa_gateway.pooling.values import float32, numbers

_NORM_TOLERANCE = 1e-2  # of length 1, in engines that compute with bfloat16


def divide(each: PooledInput, info: ModelInfo) -> list[PooledInput]:
    """The engine requests of an input: one, or parts of the model's context length if it embeds longer inputs."""
    size, token_ids = info.max_model_len, each.token_ids
    if each.params.task is not PoolingTask.EMBED or len(token_ids) <= size:
        return [each]
    return [replace(each, token_ids=token_ids[start : start + size]) for start in range(0, len(token_ids), size)]


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
