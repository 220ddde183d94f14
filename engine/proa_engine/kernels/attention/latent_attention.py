"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its cached rows, and attention over them.

A cached row is a normalised latent of keys and values, and one rotated key for all heads. Every head attends to the
same rows, whose first values are also the values: with the up-projections absorbed into the queries and the outputs
(section 2.1.2), this is attention with one KV head. On a GPU a program computes `GROUP` heads, so that a row is read
once for them; decodes and prefills have separate kernels, as in `paged_attention`.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton.language as tl

from proa_engine.kernels.attention.attention_plan import ReferencePlan
from proa_engine.kernels.attention.attention_tile import LOG2_E
from proa_engine.kernels.attention.decode_plan import DecodePlan
from proa_engine.kernels.attention.latent_kernels import latent_decode_kernel, latent_prefill_kernel
from proa_engine.kernels.attention.paged_attention import AttentionPlan, InvariantPlan
from proa_engine.kernels.attention.paged_attention_reference import paged_attention_reference
from proa_engine.kernels.attention.rotate_and_cache import rotate
from proa_engine.kernels.attention.store_kv import rows_view
from proa_engine.kernels.launch import INTERPRETED, begin, kernel, next_power_of_2
from proa_engine.kernels.rms_norm import rms_norm_reference
from proa_engine.kernels.tilings import tilings_of

GROUP = 16  # heads of a program: the rows of tl.dot
QUERIES = 2  # tokens of a prefill's program: float32 sums of as many rows stay in registers


def cache_latents(
    compressed: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Write rows of compressed [T, rank + rope_dim] to cache [num_blocks, block_size, rank + rope_dim].

    Their first `rank` values are normalised with the weight [rank] and epsilon of `norm`; the others are rotated by
    cos, sin [T, rope_dim] float32, as `rotate_part` does. Token t's slot is block * block_size + offset; slot -1 is
    padding and is not written.
    """
    if compressed.is_cpu and not INTERPRETED:
        cache_latents_reference(compressed, norm, cos, sin, cache, slot_mapping, interleaved=interleaved)
        return
    weight, eps = norm
    num_tokens, row_size = compressed.shape
    rank = len(weight)
    assert compressed.stride(1) == 1
    assert cache[0].is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    cache_latents_kernel[(num_tokens,)](
        compressed,
        weight,
        cos,
        sin,
        cache,
        slot_mapping,
        compressed.stride(0),
        eps,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_STRIDE=cache.stride(0),
        RANK=rank,
        HALF=(row_size - rank) // 2,
        BLOCK_RANK=next_power_of_2(rank),
        BLOCK_HALF=next_power_of_2((row_size - rank) // 2),
        INTERLEAVED=interleaved,
        num_warps=4,
    )


def cache_latents_reference(
    compressed: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    weight, eps = norm
    latent = rms_norm_reference(compressed[:, : len(weight)].contiguous(), weight, eps)
    key = rotate_part(compressed[:, None, len(weight) :], cos, sin, interleaved=interleaved)[:, 0]
    rows = torch.cat((latent, key), dim=-1).to(cache.dtype)
    is_token = slot_mapping >= 0
    (_, block_size, row_size), stride = cache.shape, cache.stride(0)
    slots = slot_mapping[is_token]
    places = slots // block_size * (stride // row_size) + slots % block_size
    memory = cache.as_strided(*rows_view(cache[:, None].shape, stride, row_size))
    memory.index_copy_(0, places, rows[is_token])


def rotate_part(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate x [T, heads, rope_dim]. `interleaved`: the pairs are neighbours; they come out as halves, so queries and
    keys must both be rotated so."""
    if interleaved:
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotate(x, cos, sin)


@kernel(do_not_specialize_on_alignment=["compressed_ptr", "cos_ptr", "sin_ptr"])
def cache_latents_kernel(
    compressed_ptr,  # [num_tokens, RANK + 2 * HALF]
    weight_ptr,  # [RANK]
    cos_ptr,  # [num_tokens, 2 * HALF] float32
    sin_ptr,  # [num_tokens, 2 * HALF] float32
    cache_ptr,  # [num_blocks, BLOCK_SIZE, RANK + 2 * HALF]
    slot_mapping_ptr,  # [num_tokens] int64
    stride_token,
    eps,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    row_ptr = compressed_ptr + token * stride_token
    out_ptr = cache_ptr + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * (RANK + 2 * HALF)
    column = tl.arange(0, BLOCK_RANK)
    # [BLOCK_RANK]
    latent = tl.load(row_ptr + column, mask=column < RANK, other=0.0)
    wide = latent.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / RANK + eps)
    weight = tl.load(weight_ptr + column, mask=column < RANK, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, normed * weight, mask=column < RANK)
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < HALF
    first = RANK + (2 * pair if INTERLEAVED else pair)
    second = first + (1 if INTERLEAVED else HALF)
    # [BLOCK_HALF]
    x = tl.load(row_ptr + first, mask=is_pair, other=0.0).to(tl.float32)
    y = tl.load(row_ptr + second, mask=is_pair, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * 2 * HALF + pair, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * 2 * HALF + HALF + pair, mask=is_pair, other=0.0)
    tl.store(out_ptr + RANK + pair, x * cos - y * sin, mask=is_pair)
    tl.store(out_ptr + RANK + HALF + pair, y * cos + x * sin, mask=is_pair)


@dataclass(frozen=True, slots=True)
class PartRows:
    """A step's batch over a cache that holds, in order, only some tokens of each request."""

    seq_lens: torch.Tensor  # [R] int32: tokens of each request in this cache
    ends: torch.Tensor  # [T] int32: how many of them each query token attends to
    plan: DecodePlan | None  # None on a CPU


def head_groups(num_heads: int) -> int:
    """Programs for each row of a decode: what `plan_attention` takes as the number of KV heads on a GPU."""
    return -(-num_heads // GROUP)


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    *,
    num_decodes: int,
    scale: float,
) -> torch.Tensor:
    """query [T, heads, rank + rope_dim], cache [num_blocks, block_size, rank + rope_dim] -> [T, heads, rank]

    Each block of the cache is contiguous. The other arguments describe the batch as those of `paged_attention` do.
    """
    if isinstance(plan, ReferencePlan):
        rows = cache[:, None]
        return paged_attention_reference(query, rows, rows, plan, scale)[..., :rank]
    out = torch.empty(*query.shape[:2], rank, dtype=query.dtype, device=query.device)
    if isinstance(plan, InvariantPlan):
        _prefill(query, cache, query_start_loc, seq_lens, block_table, out, 0, scale)
        return out
    if num_decodes:
        _decode(query, cache, block_table, out, plan, scale)
    if num_decodes < seq_lens.shape[0]:
        _prefill(query, cache, query_start_loc, seq_lens, block_table, out, num_decodes, scale)
    return out


def latent_attention_part(
    query: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    query_start_loc: torch.Tensor,
    rows: PartRows,
    block_table: torch.Tensor,
    *,
    num_decodes: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over those tokens that `cache` holds. Returns out [T, heads, rank], and the binary logarithms of the
    sums of weights [T, heads] float32, with which `combine_factor` adds the results over all tokens.

    A token that attends to none of them gets zeros and -inf. The arguments are those of `latent_attention`.
    """
    if rows.plan is None:
        return _part_reference(query, cache, rank, query_start_loc, rows, block_table, scale)
    out = torch.empty(*query.shape[:2], rank, dtype=query.dtype, device=query.device)
    log_sums = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    part = rows.ends, log_sums
    if num_decodes:
        _decode(query, cache, block_table, out, rows.plan, scale, *part)
    if num_decodes < rows.seq_lens.shape[0]:
        _prefill(query, cache, query_start_loc, rows.seq_lens, block_table, out, num_decodes, scale, *part)
    return out, log_sums


def combine_factor(log_sums: torch.Tensor, index: int) -> torch.Tensor:
    """log_sums [T, parts, heads] -> the factors [T, heads] float32 of part `index` in the sum of all parts' results.

    Zeros where no part has seen a token.
    """
    highest = log_sums.amax(1)
    weights = (log_sums - highest.masked_fill(highest == -torch.inf, 0.0)[:, None]).exp2()
    return weights[:, index] / weights.sum(1).clamp_min(torch.finfo(torch.float32).tiny)


def _part_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    query_start_loc: torch.Tensor,
    rows: PartRows,
    block_table: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`latent_attention_part` on any device. Token by token, so that a token's bits do not depend on its batch."""
    out = query.new_zeros(*query.shape[:2], rank)
    log_sums = torch.full(query.shape[:2], -torch.inf, device=query.device)
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        num_blocks = -(-int(rows.seq_lens[request]) // cache.shape[1])
        keys = cache[block_table[request, :num_blocks].long()].flatten(0, 1).to(torch.float32)
        for token, num_keys in enumerate(rows.ends[start:end].tolist(), start):
            if num_keys:
                scores = query[token].float() @ keys[:num_keys].T * scale
                log_sums[token] = scores.logsumexp(-1) * LOG2_E
                out[token] = (scores.softmax(-1) @ keys[:num_keys, :rank]).to(out.dtype)
    return out, log_sums


def _decode(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    ends: torch.Tensor | None = None,
    log_sums: torch.Tensor | None = None,
) -> None:
    """Write rows 0 … plan.num_rows * plan.width of out [T, heads, rank], and of log_sums [T, heads] float32. Zeros for
    padding."""
    _, num_heads, rank = out.shape
    assert query.is_contiguous()
    assert cache[0].is_contiguous()
    max_items = plan.max_items
    latent_decode_kernel[(head_groups(num_heads), max_items, plan.width)](
        query,
        cache,
        out,
        log_sums,
        torch.empty(max_items, plan.width, num_heads, rank, dtype=torch.float32, device=query.device),
        torch.empty(2, max_items, plan.width, num_heads, dtype=torch.float32, device=query.device),
        ends,
        block_table,
        plan.items,
        plan.arrived,
        max_items,
        scale * LOG2_E,
        block_table.stride(0),
        WIDTH=plan.width,
        TILE=32,
        num_warps=4,
        num_stages=5,  # two for the block table, three for rows: one tile of them is in flight
        **_constants(query, cache, rank),
    )


def _prefill(
    query: torch.Tensor,
    cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    num_decodes: int,
    scale: float,
    ends: torch.Tensor | None = None,
    log_sums: torch.Tensor | None = None,
) -> None:
    """Write out [T, heads, rank], and log_sums [T, heads] float32, of all requests behind the first `num_decodes`."""
    num_tokens, num_heads, rank = out.shape
    assert query.is_contiguous()
    assert cache[0].is_contiguous()
    num_requests = seq_lens.shape[0] - num_decodes
    latent_prefill_kernel[((num_tokens - num_decodes) // QUERIES + num_requests, head_groups(num_heads))](
        query,
        cache,
        out,
        log_sums,
        query_start_loc,
        seq_lens,
        ends,
        block_table,
        num_decodes,
        num_requests,
        scale * LOG2_E,
        block_table.stride(0),
        QUERIES=QUERIES,
        TILE=32,
        num_warps=8,
        num_stages=tilings_of(query.device).latent_prefill_stages,
        **_constants(query, cache, rank),
    )


def _constants(query: torch.Tensor, cache: torch.Tensor, rank: int) -> dict[str, int]:
    rope_dim = query.shape[2] - rank
    return {
        "NUM_HEADS": query.shape[1],
        "GROUP": GROUP,
        "RANK": rank,
        "ROPE_DIM": rope_dim,
        "BLOCK_SIZE": cache.shape[1],
        "BLOCK_STRIDE": cache.stride(0),
        "BLOCK_RANK": max(16, next_power_of_2(rank)),
        "BLOCK_ROPE": max(16, next_power_of_2(rope_dim)),
    }
