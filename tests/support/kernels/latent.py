"""Latent attention: decodes, prompts, and parts of a context that a rank holds."""

import torch

from proa_engine.kernels.attention.decode_plan import plan_decodes
from proa_engine.kernels.attention.latent_attention import (
    PartRows,
    _decode,
    _prefill,
    head_groups,
    latent_attention,
    latent_attention_part,
)
from proa_engine.kernels.attention.paged_attention import plan_attention
from support.kernel_cases import AttentionCase, attention_case
from support.kernels.case import close, grid, holds, turns

SIZES = ((4, 24, 8), (19, 40, 4))  # heads, rank, rope_dim


def with_gaps(cache: torch.Tensor) -> torch.Tensor:
    """The cache [num_blocks, block_size, row] with NaN between its blocks, as if other layers' blocks lay there."""
    blocks = torch.full((cache.shape[0], 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    blocks[:, 1] = cache
    return blocks[:, 1]


def latent_case(
    lens: list[tuple[int, int]], sizes: tuple[int, int, int], dtype: torch.dtype
) -> tuple[AttentionCase, torch.Tensor]:
    """The case, and its cache with gaps."""
    num_heads, rank, rope_dim = sizes
    case = attention_case(lens, num_heads=num_heads, num_kv_heads=1, head_dim=rank + rope_dim, dtype=dtype)
    return case, with_gaps(case.key_cache[:, 0])


def expected_rows(case: AttentionCase, cache: torch.Tensor, rank: int) -> torch.Tensor:
    """[T, heads, rank], by the CPU's attention."""
    metadata = case.metadata
    batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
    plan = plan_attention(*batch, metadata.num_decodes, cache[:, None].shape, None, block_stride=cache.stride(0))
    return latent_attention(case.query, cache, rank, *batch, plan, num_decodes=metadata.num_decodes, scale=0.25)


@holds(interpreted=turns(sizes=SIZES, lens=(((1, 1), (1, 16), (1, 37), (1, 300)), ((3, 3), (3, 150), (3, 129)))))
def latent_decodes(
    dtype: torch.dtype, device: str, sizes: tuple[int, int, int], lens: tuple[tuple[int, int], ...]
) -> None:
    case, cache = latent_case(list(lens), sizes, dtype)
    num_heads, rank, _ = sizes
    plan = plan_decodes(case.metadata.seq_lens, len(lens), head_groups(num_heads), None, lens[0][0])
    assert (plan.items[5] > 1).any()
    expected = expected_rows(case, cache, rank)
    for _ in range(2):  # two layers share a plan
        out = torch.full((*case.query.shape[:2], rank), torch.nan, dtype=dtype)
        _decode(case.query, cache, case.metadata.tables[0].block_table, out, plan, 0.25)
        close(out, expected)


@holds(interpreted=grid(sizes=SIZES, num_decodes=(0, 2)))
def latent_prompts(dtype: torch.dtype, device: str, sizes: tuple[int, int, int], num_decodes: int) -> None:
    case, cache = latent_case([(1, 33), (1, 5), (3, 3), (20, 50)], sizes, dtype)
    metadata, rank = case.metadata, sizes[1]
    batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
    out = torch.full((*case.query.shape[:2], rank), torch.nan, dtype=dtype)
    _prefill(case.query, cache, *batch, out, num_decodes, 0.25)
    close(out[num_decodes:], expected_rows(case, cache, rank)[num_decodes:])
    assert out[:num_decodes].isnan().all()


@holds(interpreted=grid(sizes=SIZES))
def latent_parts(dtype: torch.dtype, device: str, sizes: tuple[int, int, int]) -> None:
    """Caches that hold only some of the tokens, and query tokens that attend to none of them."""
    lens = [(2, 33), (2, 1), (2, 300), (2, 0), (7, 50), (20, 3)]  # query tokens; tokens in the cache
    ends = torch.tensor([32, 33, 0, 1, 120, 300, 0, 0, *range(44, 51), *[0] * 17, 1, 2, 3], dtype=torch.int32)
    case, cache = latent_case([(num_queries, max(num_queries, length)) for num_queries, length in lens], sizes, dtype)
    seq_lens = torch.tensor([length for _, length in lens], dtype=torch.int32)
    table = case.metadata.tables[0].block_table
    arguments = case.query, cache, sizes[1], case.metadata.query_start_loc
    plan = plan_decodes(seq_lens, 4, head_groups(sizes[0]), None, 2)
    assert (plan.items[5] > 1).any()
    ours, theirs = (
        latent_attention_part(*arguments, PartRows(seq_lens, ends, each), table, num_decodes=4, scale=0.25)
        for each in (plan, None)
    )
    close(ours, theirs)
