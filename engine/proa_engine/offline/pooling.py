"""Offline pooling on batches: parameters of the requests, and their results as vLLM's classes.

Torch is imported on use: it must not be before the number of its threads is set.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from proa.contract import EngineCoreOutput, PoolingParams, PoolingTask
from proa_engine.offline.outputs import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

if TYPE_CHECKING:
    from torch import Tensor


T = TypeVar("T")
TASKS = {task.name.lower(): task for task in PoolingTask}


def params_of_task(task: str | None, params: PoolingParams | None) -> PoolingParams:
    """`params` for `task`, a name of `TASKS`, or as they are. Raises `ValueError` for neither or an unknown task."""
    if task is None:
        if params is None:
            raise ValueError(f"pooling_task must be one of {', '.join(TASKS)}")
        return params
    if task not in TASKS:
        raise ValueError(f"pooling_task must be one of {', '.join(TASKS)}, got {task}")
    return PoolingParams(task=TASKS[task]) if params is None else replace(params, task=TASKS[task])


def values_of(output: EngineCoreOutput) -> "Tensor":
    """[rows, values] float32"""
    import torch

    return torch.frombuffer(bytearray(output.pooled), dtype=torch.float32).view(output.num_pooled_rows, -1)


def make_output(
    request_id: str, prompt_token_ids: list[int], output: EngineCoreOutput, make: Callable[["Tensor"], T]
) -> PoolingRequestOutput[T]:
    """`make` gets [rows, values] float32."""
    return PoolingRequestOutput(
        request_id=request_id,
        outputs=make(values_of(output)),
        prompt_token_ids=prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Each text of `data_1` with that of `data_2`, or its only one with all. Raises `ValueError` for other lengths."""
    first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second) or not first:
        raise ValueError(f"score needs one text and others, or as many as others, got {len(first)} and {len(second)}")
    return list(zip(first, second, strict=True))


def cosine_scores(
    first: Sequence[EmbeddingRequestOutput], second: Sequence[EmbeddingRequestOutput]
) -> list[ScoringRequestOutput]:
    """The cosines of the angles between embeddings."""
    import torch

    left, right = (
        torch.tensor([each.outputs.embedding for each in side], dtype=torch.float64) for side in (first, second)
    )
    return [
        PoolingRequestOutput(
            request_id=f"{a.request_id}_{b.request_id}",
            outputs=ScoringOutput(score),
            prompt_token_ids=[*a.prompt_token_ids, *b.prompt_token_ids],
            num_cached_tokens=a.num_cached_tokens + b.num_cached_tokens,
        )
        for a, b, score in zip(first, second, torch.cosine_similarity(left, right).tolist(), strict=True)
    ]
