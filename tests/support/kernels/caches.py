"""What is rotated and written to caches, and read from those of 8 bits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from proa_engine.kernels.attention.attention_plan import plan_reference
from proa_engine.kernels.attention.latent_attention import cache_latents, cache_latents_reference
from proa_engine.kernels.attention.paged_attention_reference import paged_attention_reference
from proa_engine.kernels.attention.rotate_and_cache import rotate_and_cache, rotate_and_cache_reference
from proa_engine.kernels.attention.store_kv import cache_rows, store_kv
from proa_engine.kernels.fp8 import FP8
from support.kernel_cases import attend, attention_case
from support.kernels.attention import SIZES_OF_GPUS, Lens, Sizes
from support.kernels.case import KernelCase, close, equal, grid, holds, on_device, table
from support.kernels.latent import with_gaps


def angles_of(tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `rotate_and_cache` takes them, [tokens, size] each."""
    half = torch.randn(tokens, size // 2)
    cos, sin = half.cos(), half.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def slots_of(tokens: int, num_slots: int) -> torch.Tensor:
    """Any, and none for the second token."""
    slots = torch.randperm(num_slots)[:tokens]
    slots[1] = -1
    return slots


def rotated_heads(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    rotated: float = 1.0,
    has_norms: bool = False,
    interleaved: bool = False,
    norm_values: bool = False,
    block_size: int = 16,
    tokens: int = 37,
    is_strided: bool = False,
    factor: float = 1.0,
    cache_dtype: torch.dtype | None = None,
    cache_scales: tuple[float, float] = (1.0, 1.0),
    **_scores: object,
) -> tuple[Any, ...]:
    """`rotated`: this part of a head's dimensions. `is_strided`: a block's keys and values lie side by side."""
    heads = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim).mul(factor).to(dtype)
    norms = (*torch.randn(2, head_dim).to(dtype), 1e-6) if has_norms else None
    caches = torch.full((2, 10, num_kv_heads, block_size, head_dim), 3.0).to(cache_dtype or dtype)
    if is_strided:
        caches = caches.transpose(0, 1).contiguous().transpose(0, 1)
    turns = angles_of(tokens, int(head_dim * rotated))
    return heads, norms, turns, caches, slots_of(tokens, 10 * block_size), cache_scales, interleaved, norm_values


def rotate(heads: Any, norms: Any, angles: Any, caches: Any, slots: Any, *options: Any) -> Any:
    scales, interleaved, norm_values = options
    variant = {"cache_scales": scales, "interleaved": interleaved, "norm_values": norm_values}
    return rotate_and_cache(heads, norms, angles[0], angles[1], caches[0], caches[1], slots, **variant), caches


def rotate_reference(heads: Any, norms: Any, angles: Any, caches: Any, slots: Any, *options: Any) -> Any:
    rows = cache_rows(slots, caches[0].shape, caches[0].stride(0))
    return rotate_and_cache_reference(heads, norms, angles[0], angles[1], caches[0], caches[1], rows, *options), caches


def neighbours_in_8_bits(ours: Any, theirs: Any) -> None:
    """Queries are close, and few numbers of the caches are rounded to the neighbour of theirs."""
    close(ours[0], theirs[0])
    our_cache, their_cache = ours[1].float().cpu(), theirs[1].float()
    assert (our_cache != their_cache).float().mean() < 0.01
    torch.testing.assert_close(our_cache, their_cache, rtol=0.14, atol=2**-9)


rotations = partial(KernelCase, make=rotated_heads, operation=rotate, reference=rotate_reference)
ROTATE_AND_CACHE = rotations(
    interpreted=[
        {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "block_size": 4, "tokens": 5, **options}
        for heads, kv_heads, dim, options in (
            (2, 1, 2, {"has_norms": True}),
            (3, 3, 20, {"is_strided": True}),
            (14, 2, 16, {"has_norms": True, "norm_values": True}),
            (3, 1, 12, {"has_norms": True, "interleaved": True}),
            (2, 2, 20, {"rotated": 0.3, "interleaved": True, "is_strided": True}),
            (5, 1, 20, {"rotated": 0.5, "has_norms": True, "norm_values": True, "is_strided": True}),
            (3, 0, 16, {"has_norms": True, "norm_values": True}),  # a layer that only reads the cache of another
        )
    ],
    gpu=[
        {**sizes, "rotated": rotated, "interleaved": interleaved, "has_norms": has_norms}
        | {"norm_values": has_norms and interleaved}
        for sizes in SIZES_OF_GPUS
        for rotated, interleaved in ((1.0, False), (0.5, False), (1.0, True), (0.25, True))
        for has_norms in (False, True)
    ],
)
ROTATE_AND_CACHE_IN_8_BITS = rotations(
    compare=neighbours_in_8_bits,
    interpreted=[  # some beyond the range
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4, "tokens": 5, "factor": 300.0}
        | {"cache_dtype": FP8, "cache_scales": (0.5, 2.0)}
    ],
    gpu=[
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "factor": 3.0}
        | {"cache_dtype": FP8, "cache_scales": (0.5, 2.0)}
    ],
)


@holds(
    interpreted=grid([{"sizes": {}, "scale": 0.25}], lens=(((1, 1), (1, 37), (1, 300)), ((1, 33), (3, 3), (70, 90)))),
    gpu=grid(
        [{"sizes": {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128}, "scale": 0.1}],
        lens=(((1, 1), (1, 37), (1, 700)), ((1, 33), (3, 3), (70, 900))),
    ),
)
def attention_in_8_bits(dtype: torch.dtype, device: str, lens: Lens, sizes: Sizes, scale: float) -> None:
    """Caches of 8 bits are read by both kernels as the floats that they stand for."""
    case = attention_case(list(lens), scale=scale, dtype=dtype, **sizes)
    case = replace(case, key_cache=case.key_cache.to(FP8), value_cache=case.value_cache.to(FP8))
    metadata, caches = case.metadata, (case.key_cache, case.value_cache)
    batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
    expected = paged_attention_reference(case.query, *caches, plan_reference(*batch, caches[0].shape, None), scale)
    ours = attend(on_device(case, device), scale=scale)
    close(ours, expected, 2 / 3 if ours.is_cuda and dtype == torch.float32 else 1.0)
    if device == "cpu":
        key_cache, value_cache = (cache.to(dtype) for cache in caches)
        close(ours, attend(replace(case, key_cache=key_cache, value_cache=value_cache), scale=scale))


def keys_and_values(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Keys are a slice of merged heads."""
    key = torch.randn(5, 2 * num_kv_heads, head_dim).to(dtype)[:, :num_kv_heads]
    value = torch.randn(num_kv_heads, 5, head_dim).to(dtype).transpose(0, 1)
    return key, value, torch.full((2, 6, num_kv_heads, 4, head_dim), 3.0, dtype=dtype), slots_of(5, 24)


def stored(key: torch.Tensor, value: torch.Tensor, caches: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    store_kv(key, value, caches[0], caches[1], slots, None)
    return caches


def stored_by_rows(key: torch.Tensor, value: torch.Tensor, caches: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    store_kv(key, value, caches[0], caches[1], slots, cache_rows(slots, caches[0].shape))
    return caches


STORE_KV = KernelCase(
    make=keys_and_values,
    operation=stored,
    reference=stored_by_rows,
    compare=equal,
    interpreted=table("num_kv_heads head_dim", (1, 2), (3, 20), (9, 16)),
    gpu=table("num_kv_heads head_dim", (1, 2), (3, 20), (8, 128)),
)


def compressed_rows(rank: int, rope_dim: int, interleaved: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    """A slice of merged projections; other layers' blocks lie between those of the cache."""
    compressed = torch.randn(5, rank + rope_dim + 3).to(dtype)[:, 3:]
    cache = with_gaps(torch.full((6, 4, rank + rope_dim), 3.0, dtype=dtype))
    norm = torch.randn(rank).to(dtype), 1e-6
    return compressed, norm, *angles_of(5, rope_dim), cache, slots_of(5, 24), interleaved


def cached(write: Callable[..., None], *operands: Any) -> Any:
    write(*operands[:-1], interleaved=operands[-1])
    return operands[4]


CACHE_LATENTS = KernelCase(
    make=compressed_rows,
    operation=lambda *operands: cached(cache_latents, *operands),
    reference=lambda *operands: cached(cache_latents_reference, *operands),
    interpreted=table("rank rope_dim interleaved", (24, 8, True), (40, 4, False), (7, 2, True)),
    gpu=table("rank rope_dim interleaved", (24, 8, True), (512, 64, False), (7, 2, True)),
)
