"""Paged attention (Kwon et al. 2023) in plain torch: the CPU's backend.

The batch is computed in tiles: decodes of similar length together, the tokens of short chunks among them, or the prompt
of one request. A tile's keys, and a prompt's values, are gathered by block, so that batched products can be used:

    scores = q @ k.T ; p = softmax(scores) ; out = sum over chunks c of CHUNK tokens, in order: p[c] @ v[c]

A decode's p[c] @ v[c] is a weighted sum of the cache's rows, computed in place by FBGEMM's `embedding_bag`. It takes a
twentieth of the time of gathering and multiplying, and adds the tokens in the same order.

A token's result has the same bits in every tile. On x86-64 with MKL this requires: query rows in multiples of 4 (fewer
use another GEMM kernel), softmax lengths in multiples of 16 (masked ends add exact zeros), and sums over at most 128
tokens (longer products are split at positions that depend on their length).

Cache slots behind a request's last token and before its first query token's window may hold anything, NaN included:
their scores are overwritten, a decode does not read their values, and a prefill replaces them with zeros.
"""

import math

import torch
import torch.nn.functional as F

from proa_engine.kernels.attention.attention_plan import CHUNK, LENGTH_MULTIPLE, DecodeTile, PrefillTile, ReferencePlan
from proa_engine.kernels.attention.store_kv import RowsView
from proa_engine.kernels.products.linear import weighted_sums

ROW_MULTIPLE = 4
SCORES_LIMIT = 1 << 19  # most scores of a prefill computed at once, so that they stay in the CPU's caches
MIN_QUERIES = 16


def paged_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: ReferencePlan,
    scale: float,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """query [T, heads, D], caches [num_blocks, kv_heads, block_size, D] -> [T, heads, D]; zeros for padding tokens."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1]
    # Heads that share a KV head become rows of one product.
    grouped = query.float().view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    sinks = None if sinks is None else sinks.float().view(num_kv_heads, -1, 1)
    scale = scale if soft_cap is None else scale / soft_cap
    if plan.decodes and plan.decodes[0].tokens is None:
        out = _decode(grouped, key_cache, value_cache, plan.decodes[0], plan, scale, sinks, soft_cap)
    else:
        out = torch.zeros_like(grouped)
        for decode in plan.decodes:
            assert decode.tokens is not None  # a tile of the whole batch is the only tile
            rows = grouped.index_select(0, decode.tokens)
            result = _decode(rows, key_cache, value_cache, decode, plan, scale, sinks, soft_cap)
            out.index_copy_(0, decode.tokens, result)
        scaled = grouped * scale if plan.prefills else grouped
        for prefill in plan.prefills:
            _prefill(out, scaled, key_cache, value_cache, prefill, plan, sinks, soft_cap)
    return out.reshape(num_tokens, num_heads, head_dim).to(query.dtype)


def _decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tile: DecodeTile,
    plan: ReferencePlan,
    scale: float,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """query [n, kv_heads, group, D] -> the same, of the tile's requests."""
    n, num_kv_heads, group, head_dim = query.shape
    num_rows = group + -group % ROW_MULTIPLE
    rows = torch.zeros(n, num_kv_heads, num_rows, head_dim)
    rows[:, :, :group].add_(query, alpha=scale)  # takes a third of the time of writing query * scale
    key = _gather(key_cache, plan.blocks, tile.block_rows, plan.keys, n * num_kv_heads)
    scores = torch.bmm(rows.view(n * num_kv_heads, num_rows, head_dim), key.transpose(1, 2))
    if soft_cap is not None:
        _cap(scores, soft_cap)
    scores = scores.view(n, num_kv_heads, num_rows, tile.length)[:, :, :group]
    if tile.masked is not None:
        scores = torch.where(tile.masked, -torch.inf, scores)
    probabilities = torch.softmax(scores, dim=-1) if sinks is None else _softmax(scores, sinks)
    return _sum_of_rows(probabilities, value_cache.as_strided(*plan.tokens), tile.token_rows)


def _sum_of_rows(probabilities: torch.Tensor, value: torch.Tensor, token_rows: torch.Tensor) -> torch.Tensor:
    """probabilities [n, kv_heads, group, length], values [rows, D], their rows [n, kv_heads, 1, length]
    -> [n, kv_heads, group, D]"""
    if value.dtype != torch.float32:
        value = value.index_select(0, token_rows.flatten()).float()
        token_rows = torch.arange(len(value)).view(token_rows.shape)
    length = probabilities.shape[-1]
    starts = torch.arange(0, probabilities.numel(), length)
    if length > CHUNK:
        starts = (starts[:, None] + torch.arange(0, length, CHUNK)).flatten()
    chunks = weighted_sums(value, token_rows.expand(probabilities.shape).reshape(-1), starts, probabilities.reshape(-1))
    total, *others = chunks.view(*probabilities.shape[:-1], -1, chunks.shape[1]).unbind(-2)
    for other in others:
        total = total + other
    return total


def _prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tile: PrefillTile,
    plan: ReferencePlan,
    sinks: torch.Tensor | None,
    soft_cap: float | None,
) -> None:
    num_kv_heads, group, head_dim = query.shape[1:]
    key = _gather(key_cache, plan.blocks, tile.block_rows, plan.keys, num_kv_heads).transpose(1, 2)
    value = _gather(value_cache, plan.blocks, tile.block_rows, plan.values, num_kv_heads)
    value[:, tile.num_tokens :] = 0
    if tile.num_hidden:
        value[:, : tile.num_hidden] = 0
    start = tile.start
    while start < tile.end:
        position = tile.num_tokens - (tile.end - start)  # of the first query, among the gathered tokens
        end = min(start + _slice_length(position, num_kv_heads * group), tile.end)
        ends = tile.ends_of(start, end)
        first, last = tile.columns(position, end - start, plan.window, ends)
        rows = F.pad(query[start:end], (0, 0, 0, 0, 0, 0, 0, (start - end) % ROW_MULTIPLE))  # [t, kv_heads, group, D]
        num_rows = rows.shape[0]
        scores = torch.bmm(rows.permute(1, 2, 0, 3).flatten(1, 2), key[:, :, first:last])
        if soft_cap is not None:
            _cap(scores, soft_cap)
        scores = scores.view(num_kv_heads, group, num_rows, -1)
        _mask(scores, position - first, plan.window, None if ends is None else ends - first)
        probabilities = torch.softmax(scores, dim=-1) if sinks is None else _softmax(scores, sinks[:, :, None])
        result = _weighted_sum(probabilities.flatten(1, 2), value[:, first:last])
        out[start:end] = result.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3)[: end - start]
        start = end


def _slice_length(position: int, num_heads: int) -> int:
    """The largest number q of queries from `position` on with num_heads * q * (position + q) <= SCORES_LIMIT."""
    most = (math.isqrt(position**2 + 4 * SCORES_LIMIT // num_heads) - position) // 2
    return max(most // MIN_QUERIES * MIN_QUERIES, MIN_QUERIES)


def _gather(
    cache: torch.Tensor, blocks: RowsView, block_rows: torch.Tensor, workspace: torch.Tensor, batch: int
) -> torch.Tensor:
    """[num_blocks, kv_heads, block_size, D] -> [batch, length, D] float32, in the workspace."""
    rows = cache.as_strided(*blocks)
    width = rows.shape[1]
    gathered = workspace[: block_rows.numel() * width].view(-1, width)
    if cache.dtype == torch.float32:
        torch.index_select(rows, 0, block_rows, out=gathered)
    else:
        gathered.copy_(rows.index_select(0, block_rows))
    return gathered.view(batch, -1, cache.shape[-1])


def _weighted_sum(probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[B, rows, length] x [B, length, D] -> [B, rows, D]"""
    length = value.shape[1]
    if length <= CHUNK:
        return torch.bmm(probabilities, value)
    total = torch.bmm(probabilities[:, :, :CHUNK], value[:, :CHUNK])
    for start in range(CHUNK, length, CHUNK):
        total.baddbmm_(probabilities[:, :, start : start + CHUNK], value[:, start : start + CHUNK])
    return total


def _mask(scores: torch.Tensor, position: int, window: int | None, ends: torch.Tensor | None) -> None:
    """Set the scores [kv_heads, group, rows, length] of hidden keys to -inf; query i is at `position` + i.

    `ends` [queries]: of the keys that it attends to; None: it is the last. Rows behind the queries have any result.
    """
    num_queries, length = scores.shape[2:]
    first = position if window is None else 0
    query = torch.arange(position, position + num_queries)[:, None]
    key = torch.arange(first, length)
    hidden = key > query if ends is None else key >= F.pad(ends, (0, num_queries - len(ends)))[:, None]
    if window is not None:
        hidden |= key <= query - window
    scores[..., first:].masked_fill_(hidden, -torch.inf)


def _cap(scores: torch.Tensor, soft_cap: float) -> None:
    """Cap scores, which are divided by the soft cap, in place."""
    scores.tanh_().mul_(soft_cap)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Probabilities of scores [..., length], for which a sink [..., 1] counts as one more score.

    It comes in the first of `LENGTH_MULTIPLE` columns before the scores, so that its place in the sum does not depend
    on their number.
    """
    columns = scores.new_full((*scores.shape[:-1], LENGTH_MULTIPLE), -torch.inf)
    columns[..., :1] = sinks
    return torch.softmax(torch.cat((columns, scores), dim=-1), dim=-1)[..., LENGTH_MULTIPLE:]
