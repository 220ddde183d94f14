"""What vLLM's tests of embeddings use of its helpers: for models, and to read values that are bytes."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ENDIANNESS = ("native", "big", "little")
EMBED_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


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


def compute_maxsim_score(query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """query [tokens, values], document [tokens, values] -> sum of the largest product of each of the query's tokens"""
    return (query.float() @ document.float().T).amax(dim=1).sum()


def run_embedding_correctness_test(*_: object, **__: object) -> None:
    raise AssertionError("the test compares with the checkpoint that it names")


@dataclass(frozen=True)
class MetadataItem:
    """Where the values of an input are in the bytes."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: Sequence[int]


def build_metadata_items(embed_dtype: str, endianness: str, shape: Sequence[int], n_request: int) -> list[MetadataItem]:
    size = math.prod(shape) * EMBED_DTYPES[embed_dtype].itemsize
    return [
        MetadataItem(index, embed_dtype, endianness, index * size, (index + 1) * size, shape)
        for index in range(n_request)
    ]


def binary2tensor(binary: bytes, shape: Sequence[int], embed_dtype: str, endianness: str) -> torch.Tensor:
    dtype = EMBED_DTYPES[embed_dtype]
    words = np.frombuffer(binary, dtype=f"u{dtype.itemsize}")
    if endianness not in ("native", sys.byteorder):
        words = words.byteswap()
    return torch.frombuffer(bytearray(words.tobytes()), dtype=dtype).reshape(*shape)


def decode_pooling_output(items: Sequence[MetadataItem], body: bytes) -> list[torch.Tensor]:
    parts = [(body[item.start : item.end], item) for item in sorted(items, key=lambda item: item.index)]
    return [binary2tensor(part, item.shape, item.embed_dtype, item.endianness) for part, item in parts]
