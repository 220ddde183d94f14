"""Attention over the paged KV cache in plain torch: the CPU's backend.

The batch is worked off in tiles: decodes of similar length side by side, or one request's prompt. A tile's keys and
values are gathered whole, by block, so that batched products do the work:

    scores = q @ k.T ; p = softmax(scores) ; out = sum over chunks c of CHUNK tokens, in order: p[c] @ v[c]

A token's result has the same bits in whatever tile it is computed. Measured on AVX2 (MKL) with one to four threads,
that takes: query rows in multiples of 4 (fewer go to another GEMM kernel), softmax lengths in multiples of 16 (masked
ends add exact zeros), and products over at most 128 tokens (longer ones are cut where their length says).

Slots behind a request's end may hold anything, NaN included: their scores are overwritten, their values zeroed.
"""

import torch
import torch.nn.functional as F

from proa_engine.kernels.attention_plan import CHUNK, DecodeTile, PrefillTile, ReferencePlan

ROW_MULTIPLE = 4
SCORES_LIMIT = 1 << 22  # numbers in the scores held at a time by a prefill
MIN_QUERIES = 16


def paged_attention_reference(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, plan: ReferencePlan, scale: float
) -> torch.Tensor:
    """query [T, heads, D], caches [num_blocks, kv_heads, block_size, D] -> [T, heads, D]; zeros for padding tokens."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    # Heads that share a KV head become rows of one product.
    grouped = query.float().mul(scale).view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.zeros_like(grouped)
    for decode in plan.decodes:
        _decode(out, grouped, key_cache, value_cache, decode)
    for prefill in plan.prefills:
        _prefill(out, grouped, key_cache, value_cache, prefill, plan.window)
    return out.view(num_tokens, num_heads, head_dim).to(query.dtype)


def _decode(
    out: torch.Tensor, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tile: DecodeTile
) -> None:
    num_kv_heads, group, head_dim = query.shape[1:]
    n = tile.tokens.numel()
    rows = F.pad(query.index_select(0, tile.tokens), (0, 0, 0, -group % ROW_MULTIPLE)).flatten(0, 1)
    key = _gather(key_cache, tile.block_rows, n * num_kv_heads)
    scores = torch.bmm(rows, key.transpose(1, 2))
    scores.view(n, -1, tile.length).masked_fill_(tile.masked, -torch.inf)
    value = _gather(value_cache, tile.block_rows, n * num_kv_heads)
    value.view(-1, head_dim).index_fill_(0, tile.stale_rows, 0)
    result = _weighted_sum(torch.softmax(scores, dim=-1), value)
    out.index_copy_(0, tile.tokens, result.view(n, num_kv_heads, -1, head_dim)[:, :, :group])


def _prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tile: PrefillTile,
    window: int | None,
) -> None:
    num_kv_heads, group, head_dim = query.shape[1:]
    key = _gather(key_cache, tile.block_rows, num_kv_heads)
    value = _gather(value_cache, tile.block_rows, num_kv_heads)
    value[:, tile.num_tokens :] = 0
    step = max(MIN_QUERIES, SCORES_LIMIT // (num_kv_heads * group * key.shape[1]) // ROW_MULTIPLE * ROW_MULTIPLE)
    for start in range(tile.start, tile.end, step):
        end = min(start + step, tile.end)
        position = tile.num_tokens - (tile.end - start)  # of the first query, among the gathered tokens
        columns = tile.columns(position, end - start, window)
        rows = F.pad(query[start:end], (0, 0, 0, 0, 0, 0, 0, -(end - start) % ROW_MULTIPLE))  # [t, kv, group, D]
        num_rows = rows.shape[0]
        scores = torch.bmm(rows.permute(1, 2, 0, 3).flatten(1, 2), key[:, columns].transpose(1, 2))
        mask = _causal_mask(position - columns.start, num_rows, scores.shape[-1], window)
        scores.view(num_kv_heads, group, num_rows, -1).masked_fill_(mask, -torch.inf)
        result = _weighted_sum(torch.softmax(scores, dim=-1), value[:, columns])
        out[start:end] = result.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3)[: end - start]


def _gather(cache: torch.Tensor, block_rows: torch.Tensor, batch: int) -> torch.Tensor:
    """[num_blocks, kv_heads, block_size, D] -> [batch, length, D] float32, freshly written."""
    head_dim = cache.shape[-1]
    return cache.flatten(0, 1).flatten(1).index_select(0, block_rows).view(batch, -1, head_dim).float()


def _weighted_sum(probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, rows, length] x [B, length, D] -> [B, rows, D]"""
    total = torch.bmm(probabilities[:, :, :CHUNK], value[:, :CHUNK])
    for start in range(CHUNK, value.shape[1], CHUNK):
        total.baddbmm_(probabilities[:, :, start : start + CHUNK], value[:, start : start + CHUNK])
    return total


def _causal_mask(position: int, num_queries: int, length: int, window: int | None) -> torch.Tensor:
    """[num_queries, length], true where query i, at `position` + i, must not look."""
    query = torch.arange(position, position + num_queries)[:, None]
    key = torch.arange(length)
    hidden = key > query
    return hidden if window is None else hidden | (key <= query - window)
