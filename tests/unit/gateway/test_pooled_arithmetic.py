"""The arithmetic on pooled values: right for any length, and not on the event loop."""

import math
import time
from array import array
from collections.abc import Awaitable, Sequence

import pytest

from proa_gateway.apis.embeddings.late_chunking import chunk_embeddings
from proa_gateway.apis.scores.scorers import max_sim, max_sims
from proa_gateway.output.pooled import PooledValues
from proa_gateway.pooling.encoder import ValueEncoder

LOOP_SECONDS = 0.05  # that a request may take from the others


def pooled(rows: Sequence[Sequence[float]]) -> PooledValues:
    return PooledValues(array("f", [value for row in rows for value in row]).tobytes(), len(rows))


def test_the_closest_rows_count_in_documents_of_any_length() -> None:
    query = pooled([[1.0, 0.0], [0.0, 1.0]])
    far = [[-1.0, -2.0]] * 8192
    assert max_sim(query, pooled([[0.5, 0.25]])) == 0.75
    assert max_sim(query, pooled([*far, [0.5, 0.0], *far, [0.0, 0.25]])) == 0.75
    assert max_sim(query, pooled(far)) == -3.0
    assert max_sim(pooled([[1.0, 0.0]] * 3000), pooled([[0.5, 0.25]])) == 1500.0


@pytest.mark.parametrize(("normalize", "expected"), [(False, [4.0, 3.0, 6.0, 8.0]), (True, [0.8, 0.6, 0.6, 0.8])])
def test_the_last_chunk_is_the_mean_of_the_rows_that_are_left(normalize: bool, expected: list[float]) -> None:
    chunks = chunk_embeddings(pooled([[1.0, 2.0], [7.0, 4.0], [6.0, 8.0]]), 2, normalize=normalize)
    assert chunks.num_rows == 2
    assert array("f", chunks.values).tolist() == pytest.approx(expected)


def test_a_chunk_of_zeros_stays_zeros() -> None:
    assert chunk_embeddings(pooled([[0.0, 0.0]]), 1, normalize=True) == PooledValues(bytes(8), 1)


async def seconds_of_the_loop(work: Awaitable[object]) -> float:
    """CPU time of the event loop's thread."""
    start = time.thread_time()
    await work
    return time.thread_time() - start


async def test_scores_of_a_hundred_documents_leave_the_event_loop_free() -> None:
    query = pooled([[math.sin(token + index) for index in range(128)] for token in range(32)])
    document = pooled([[math.cos(token * index) for index in range(128)] for token in range(512)])
    assert await seconds_of_the_loop(max_sims([query], [document] * 100)) < LOOP_SECONDS


async def test_number_formats_of_many_values_leave_the_event_loop_free() -> None:
    encoder = ValueEncoder("fp8_e4m3", "little", has_rows=True)
    assert await seconds_of_the_loop(encoder.encode([pooled([[0.1] * 1024] * 1024)])) < LOOP_SECONDS
