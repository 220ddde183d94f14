"""What vLLM's tests of embeddings use of its helpers for models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class EmbedModelInfo:
    name: str
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None


def float_embeddings(response: Any) -> list[list[float]]:
    return [item.embedding for item in response.data]


def check_embeddings_close(
    *,
    embeddings_0_lst: Sequence[list[float]],
    embeddings_1_lst: Sequence[list[float]],
    name_0: str,
    name_1: str,
    tol: float = 1e-3,
) -> None:
    """Each embedding of one list points where the other's does: the cosine is above 1 - `tol`."""
    assert len(embeddings_0_lst) == len(embeddings_1_lst)
    for first, second in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        cosine = torch.cosine_similarity(torch.tensor(first), torch.tensor(second), dim=0)
        assert cosine >= 1 - tol, f"{name_0} and {name_1}: the cosine is {cosine}"


def run_embedding_correctness_test(*_: object, **__: object) -> None:
    raise AssertionError("the test compares with the checkpoint that it names")
