"""Kernels of latent attention against their references, on CPU tensors of odd shapes in Triton's interpreter."""

import torch

from proa_engine.kernels.attention import latent_attention
from proa_engine.kernels.attention.decode_plan import plan_decodes
from proa_engine.kernels.attention.latent_attention import (
    PartRows,
    cache_latents,
    cache_latents_reference,
    head_groups,
    latent_attention_part,
)
from proa_engine.kernels.attention.paged_attention import plan_attention
from support.interpreter import TOLERANCE, close
from support.kernel_cases import AttentionCase, attention_case
from support.thorough import combinations

SHAPES = ((4, 24, 8), (19, 40, 4))  # heads, rank, rope_dim


def with_gaps(cache: torch.Tensor) -> torch.Tensor:
    """The cache [num_blocks, block_size, row] with NaN between its blocks, as if other layers' blocks lay there."""
    blocks = torch.full((cache.shape[0], 3, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    blocks[:, 1] = cache
    return blocks[:, 1]


def expected_rows(case: AttentionCase, cache: torch.Tensor, rank: int) -> torch.Tensor:
    """[T, heads, rank] float32, by the CPU's attention."""
    metadata = case.metadata
    batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
    plan = plan_attention(*batch, metadata.num_decodes, cache[:, None].shape, None, block_stride=cache.stride(0))
    out = latent_attention.latent_attention(
        case.query, cache, rank, *batch, plan, num_decodes=metadata.num_decodes, scale=0.25
    )
    return out.float()


def check_latent_decode(dtype: torch.dtype) -> None:
    for (num_heads, rank, rope_dim), (width, lens) in combinations(SHAPES, ((1, (1, 16, 37, 300)), (3, (3, 150, 129)))):
        case = attention_case(
            [(width, length) for length in lens],
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=rank + rope_dim,
            dtype=dtype,
        )
        cache, metadata = with_gaps(case.key_cache[:, 0]), case.metadata
        plan = plan_decodes(metadata.seq_lens, len(lens), head_groups(num_heads), None, width)
        assert (plan.items[5] > 1).any()
        for _ in range(2):  # two layers share a plan
            out = torch.full((*case.query.shape[:2], rank), torch.nan, dtype=dtype)
            latent_attention._decode(case.query, cache, metadata.tables[0].block_table, out, plan, 0.25)
            close(out.float(), expected_rows(case, cache, rank), TOLERANCE[dtype])


def check_latent_prefill(dtype: torch.dtype) -> None:
    lens = [(1, 33), (1, 5), (3, 3), (20, 50)]
    for num_heads, rank, rope_dim in SHAPES:
        case = attention_case(lens, num_heads=num_heads, num_kv_heads=1, head_dim=rank + rope_dim, dtype=dtype)
        cache, metadata = with_gaps(case.key_cache[:, 0]), case.metadata
        batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
        for num_decodes in (0, 2):
            out = torch.full((*case.query.shape[:2], rank), torch.nan, dtype=dtype)
            latent_attention._prefill(case.query, cache, *batch, out, num_decodes, 0.25)
            expected = expected_rows(case, cache, rank)
            close(out[num_decodes:].float(), expected[num_decodes:], TOLERANCE[dtype])
            assert out[:num_decodes].isnan().all()


def check_latent_parts(dtype: torch.dtype) -> None:
    """Caches that hold only some of the tokens, and query tokens that attend to none of them."""
    lens = [(2, 33), (2, 1), (2, 300), (2, 0), (7, 50), (20, 3)]  # query tokens; tokens in the cache
    ends = torch.tensor([32, 33, 0, 1, 120, 300, 0, 0, *range(44, 51), *[0] * 17, 1, 2, 3], dtype=torch.int32)
    for num_heads, rank, rope_dim in SHAPES:
        whole = [(num_queries, max(num_queries, length)) for num_queries, length in lens]
        case = attention_case(whole, num_heads=num_heads, num_kv_heads=1, head_dim=rank + rope_dim, dtype=dtype)
        cache, metadata = with_gaps(case.key_cache[:, 0]), case.metadata
        seq_lens = torch.tensor([length for _, length in lens], dtype=torch.int32)
        table = metadata.tables[0].block_table
        arguments = case.query, cache, rank, metadata.query_start_loc
        plan = plan_decodes(seq_lens, 4, head_groups(num_heads), None, 2)
        assert (plan.items[5] > 1).any()
        expected = latent_attention_part(*arguments, PartRows(seq_lens, ends, None), table, num_decodes=4, scale=0.25)
        rows = PartRows(seq_lens, ends, plan)
        out, log_sums = latent_attention_part(*arguments, rows, table, num_decodes=4, scale=0.25)
        close(out.float(), expected[0].float(), TOLERANCE[dtype])
        close(log_sums, expected[1], TOLERANCE[dtype])


def check_cache_latents(dtype: torch.dtype) -> None:
    slots = torch.tensor([9, -1, 23, 0, 7])
    for rank, rope_dim, interleaved in ((24, 8, True), (40, 4, False), (7, 2, True)):
        compressed = torch.randn(5, rank + rope_dim + 3).to(dtype)[:, 3:]  # a slice of merged projections
        cos, sin = torch.randn(2, 5, rope_dim // 2)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        norm = torch.randn(rank).to(dtype), 1e-6
        ours, theirs = (with_gaps(torch.full((6, 4, rank + rope_dim), 3.0, dtype=dtype)) for _ in range(2))
        cache_latents(compressed, norm, cos, sin, ours, slots, interleaved=interleaved)
        cache_latents_reference(compressed, norm, cos, sin, theirs, slots, interleaved=interleaved)
        close(ours, theirs)
