"""Kernel inputs with expected outputs, shared by the tests in Triton's interpreter and on a GPU."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from proa_engine.kernels.attention.decode_plan import plan_decodes
from proa_engine.kernels.attention.paged_attention import (
    AttentionPlan,
    InvariantPlan,
    paged_attention,
    plan_attention,
)
from proa_engine.kernels.launch import INTERPRETED
from proa_engine.kernels.products.lora_matmul import SlotMatrices, SlotTokens, output_tiles, sort_tokens
from proa_engine.kernels.products.skinny_gemm import unnormed_rows
from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.layers.attention_metadata import AttentionMetadata
from support.paged_model import attention_metadata

ROUNDING = 1e-5  # of sums of probabilities in float32


@dataclass(frozen=True)
class AttentionCase:
    query: torch.Tensor  # [T, heads, D]
    key_cache: torch.Tensor  # [num_blocks, kv_heads, block_size, D], NaN where no token is that the query attends to
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    sinks: torch.Tensor | None  # [heads]
    soft_cap: float | None
    expected: torch.Tensor  # [T, heads, D] float32, by a dense softmax in float64

    @property
    def scores(self) -> dict[str, Any]:
        """Arguments of kernels."""
        return {"sinks": self.sinks, "soft_cap": self.soft_cap}


def attention_case(
    lens: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    window: int | None = None,
    scale: float = 0.25,
    has_sinks: bool = False,
    soft_cap: float | None = None,
    is_strided: bool = False,
    images: Sequence[tuple[int, int, int]] = (),
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> AttentionCase:
    """Requests with the given (query length, sequence length), decodes first, in randomly ordered blocks.

    Where a request needs no block, behind its end and before its window, its table has block 0, which holds nothing.
    `is_strided`: a block's keys and values lie side by side. `images` (request, start, end): their tokens attend to all
    up to their end. Not `causal`: all do up to their request's end.
    """
    generator = torch.Generator().manual_seed(len(lens) + num_heads)
    num_blocks = sum(-(-seq_len // block_size) for _, seq_len in lens) + 3
    free = list(range(1, num_blocks))
    random.Random(0).shuffle(free)
    shape = num_blocks, num_kv_heads, block_size, head_dim
    caches = torch.full((2, *shape), torch.nan, dtype=dtype, device=device)
    if is_strided:
        caches = torch.full((num_blocks, 2, *shape[1:]), torch.nan, dtype=dtype, device=device).transpose(0, 1)
    sinks = torch.randn(num_heads, generator=generator).add(1).to(dtype).to(device) if has_sinks else None
    queries, expected, tables, ends = [], [], [], []
    for request, (query_len, seq_len) in enumerate(lens):
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        columns = range(-(-seq_len // block_size))
        table = [free.pop() if column >= first // block_size else 0 for column in columns]
        tables.append(table)
        query = torch.randn(query_len, num_heads, head_dim, generator=generator).to(dtype).to(device)
        key, value = torch.randn(2, seq_len, num_kv_heads, head_dim, generator=generator).to(dtype).to(device)
        positions = torch.arange(first, seq_len, device=device)
        blocks = torch.tensor(table, device=device)[positions // block_size]
        for cache, rows in zip(caches, (key, value), strict=True):
            cache[blocks, :, positions % block_size] = rows[first:]
        queries.append(query)
        ends_of = torch.arange(1, seq_len + 1) if causal else torch.full((seq_len,), seq_len)
        for start, end in (image[1:] for image in images if image[0] == request):
            ends_of[start:end] = end
        ends.append(ends_of[seq_len - query_len :].to(device))
        expected.append(dense_attention(query, key, value, scale, window, sinks, soft_cap, ends[-1]))
    query_lens, seq_lens = zip(*lens, strict=True)
    key_cache, value_cache = caches
    metadata = attention_metadata(query_lens, seq_lens, tables, block_size, device)
    if images:
        metadata = replace(metadata, ends=torch.cat(ends).int())
    return AttentionCase(
        query=torch.cat(queries),
        key_cache=key_cache,
        value_cache=value_cache,
        metadata=metadata,
        sinks=sinks,
        soft_cap=soft_cap,
        expected=torch.cat(expected),
    )


def padded_case(case: AttentionCase, width: int) -> AttentionCase:
    """The same requests as decodes of `width` query tokens: those before a request's own are padding without a slot,
    for which zeros are expected."""
    counts = case.metadata.query_start_loc.diff().tolist()
    is_token = torch.cat([torch.arange(width, 0, -1) <= count for count in counts])

    def padded(rows: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        padding[is_token] = rows.cpu()
        return padding.to(rows.device)

    shape = len(is_token), *case.query.shape[1:]
    table = case.metadata.tables[0]
    metadata = replace(
        case.metadata,
        query_start_loc=torch.arange(0, len(is_token) + 1, width, dtype=torch.int32, device=case.query.device),
        tables=(replace(table, slot_mapping=padded(table.slot_mapping, torch.full((len(is_token),), -1))),),
        num_decodes=len(counts),
        decode_width=width,
    )
    query = padded(case.query, torch.randn(shape).to(case.query.dtype))
    return replace(case, query=query, metadata=metadata, expected=padded(case.expected, torch.zeros(shape)))


def with_padding(case: AttentionCase, num_rows: int, width: int) -> AttentionCase:
    """The same requests and, behind them, rows of `width` tokens without a request, for which zeros are expected."""
    metadata, device, num_tokens = case.metadata, case.query.device, num_rows * width
    (table,) = metadata.tables
    starts = metadata.query_start_loc[-1] + width * torch.arange(1, num_rows + 1, dtype=torch.int32, device=device)
    block_table = torch.cat((table.block_table, table.block_table[:1].expand(num_rows, -1)))
    slots = torch.cat((table.slot_mapping, table.slot_mapping.new_full((num_tokens,), -1)))
    metadata = replace(
        metadata,
        query_start_loc=torch.cat((metadata.query_start_loc, starts)),
        seq_lens=torch.cat((metadata.seq_lens, metadata.seq_lens.new_zeros(num_rows))),
        tables=(replace(table, block_table=block_table, slot_mapping=slots),),
        num_decodes=metadata.num_decodes + num_rows,
    )
    return replace(
        case,
        query=torch.cat((case.query, case.query[:num_tokens])),
        metadata=metadata,
        expected=torch.cat((case.expected, torch.zeros_like(case.expected[:num_tokens]))),
    )


def plan_of(
    case: AttentionCase,
    window: int | None,
    decode_width: int = 1,
    *,
    causal: bool = True,
    batch_invariant: bool = False,
    has_slots: bool = True,
) -> AttentionPlan:
    """The plan for the backend of the case's device, which is Triton in Triton's interpreter too. `decode_width`: if
    not 1, of all requests. Not `has_slots`: without the slots of wider decodes, which may begin with padding."""
    metadata, (table,) = case.metadata, case.metadata.tables
    num_decodes = metadata.num_decodes if decode_width == 1 else len(metadata.seq_lens)
    slots = table.slot_mapping if has_slots and decode_width > 1 else None
    if INTERPRETED and batch_invariant:
        return InvariantPlan(slots)
    if INTERPRETED:
        num_kv_heads = case.key_cache.shape[1]
        return plan_decodes(metadata.seq_lens, num_decodes, num_kv_heads, window, decode_width, slots, causal=causal)
    return plan_attention(
        metadata.query_start_loc,
        metadata.seq_lens,
        table.block_table,
        num_decodes,
        case.key_cache.shape,
        window,
        decode_width=decode_width,
        batch_invariant=batch_invariant,
        slot_mapping=slots,
        block_stride=case.key_cache.stride(0),
        ends=metadata.ends,
        causal=causal,
    )


def attend(
    case: AttentionCase,
    window: int | None = None,
    scale: float = 0.25,
    decode_width: int = 1,
    *,
    causal: bool = True,
    plan: AttentionPlan | None = None,
    following: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Compute the case, [T, heads, D]. `plan`: None: that of `plan_of`."""
    metadata = case.metadata
    return paged_attention(
        case.query,
        case.key_cache,
        case.value_cache,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.tables[0].block_table,
        plan or plan_of(case, window, decode_width, causal=causal),
        num_decodes=metadata.num_decodes if decode_width == 1 else len(metadata.seq_lens),
        scale=scale,
        window=window,
        ends=metadata.ends,
        following=following,
        **case.scores,
    )


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [t, heads, D] at the end of key and value [seq_len, kv_heads, D] -> [t, heads, D] float32.

    `ends` [t]: the end of what each query attends to; None: its own position + 1.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position = torch.arange(key.shape[0] - query.shape[0], key.shape[0], device=key.device)[:, None]
    other = torch.arange(key.shape[0], device=key.device)
    hidden = other >= (position + 1 if ends is None else ends[:, None])
    if window is not None:
        hidden |= other <= position - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(query), 1)), dim=-1)
    probabilities = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", probabilities, value).float()


@dataclass(frozen=True, slots=True)
class MaskCase:
    logits: torch.Tensor  # [all rows, vocab]
    rows: torch.Tensor  # [masked rows] int64
    bits: torch.Tensor  # [masked rows, words] int32
    expected: torch.Tensor  # as the logits


def mask_cases(dtype: torch.dtype) -> list[MaskCase]:
    """Rows in any order, vocabularies of parts of words and of chunks, and masks with more bits than tokens."""
    generator = torch.Generator().manual_seed(5)
    cases = []
    for vocab_size, num_words, rows in (
        (1, 1, [0]),
        (33, 2, [2, 0]),
        (64, 5, [1]),
        (8192, 256, [3, 1, 2, 0]),
        (20_011, 630, [4, 1]),
        (40_000, 1250, [1, 2, 3, 5, 8]),  # more tokens than the reference masks at once
    ):
        # [masked rows, words * 32]
        share = torch.rand(len(rows), 1, generator=generator)
        allowed = torch.rand(len(rows), num_words * 32, generator=generator) < share
        allowed[0] = True
        logits = torch.randn(max(rows) + 2, vocab_size + 3, generator=generator).to(dtype)[:, :vocab_size]
        expected = logits.clone()
        expected[rows] = expected[rows].masked_fill(~allowed[:, :vocab_size], -torch.inf)
        bits = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int32))
        cases.append(MaskCase(logits, torch.tensor(rows), bits, expected))
    return cases


@dataclass(frozen=True)
class SamplingCase:
    logits: torch.Tensor  # [rows, vocab]
    params: torch.Tensor  # [slots, NUM_COLUMNS] float64
    slots: torch.Tensor  # [rows] int64
    positions: torch.Tensor  # [rows] int64

    def check_limits(self, thresholds: torch.Tensor) -> None:
        """Assert that thresholds [rows] keep the tokens that the limits allow.

        The sums of probabilities may be off by float32's rounding, so that another value ends a row at top-p. Tokens
        are kept or left out together if their logits are equal.
        """
        chosen = self.params[self.slots].cpu()
        rows = self.logits.double().cpu()
        for logits, params, threshold in zip(rows, chosen, thresholds.double().cpu(), strict=True):
            temperature, min_p, top_p = params[[columns.TEMPERATURE, columns.MIN_P, columns.TOP_P]].tolist()
            kept = (logits >= threshold) & logits.isfinite()
            if temperature == 0:
                assert torch.equal(kept, logits.isfinite())
                continue
            shares = (logits / temperature).softmax(0)
            shares = shares.masked_fill(shares < shares.max() * min_p, 0)
            least = shares.topk(min(int(params[columns.TOP_K]), len(shares))).values[-1]
            shares = shares.masked_fill(shares < least, 0)
            shares = shares / shares.sum()
            assert (shares[kept] > 0).all(), "a token that min-p or top-k leave out is kept"
            if top_p >= 1:
                assert torch.equal(kept, shares > 0)
                continue
            last = kept & (logits == logits[kept].min())
            assert shares[kept].sum() > top_p - ROUNDING, "the kept probabilities sum to less than top-p"
            assert shares[kept & ~last].sum() < top_p + ROUNDING, "those above the last value sum to top-p"


def limit_cases(dtype: torch.dtype) -> list[SamplingCase]:
    """Rows whose limits keep few tokens or most of them: many, equal and hardly any logits, over several chunks."""
    limits = [
        (0.6, 0.0, 20, 0.95),
        (1.0, 0.0, 1, 1.0),
        (1.0, 0.0, 2000, 1.0),
        (1.0, 0.0, 2000, 0.7),
        (0.3, 0.0, 0, 0.9),
        (2.0, 0.0, 0, 0.9),
        (1.0, 0.1, 0, 1.0),
        (1.0, 1e-4, 0, 0.9),
        (1.0, 0.02, 50, 0.8),
    ]
    generator = torch.Generator().manual_seed(7)
    vocab_size = 17_003
    random = torch.randn(vocab_size, generator=generator) * 3
    equal = torch.full((vocab_size,), 1.5)
    equal[::5000] = 2
    few = torch.full((vocab_size,), -torch.inf)
    few[::4999] = random[::4999]
    negative = random.abs() - 40
    rows = [(random, each) for each in limits]
    rows += [(each, limits[index]) for each in (equal, few, negative) for index in (0, 5)]
    logits = torch.stack([each for each, _ in rows]).to(dtype)
    params = torch.zeros(len(rows), columns.NUM_COLUMNS, dtype=torch.float64)
    for slot, (_, (temperature, min_p, top_k, top_p)) in enumerate(rows):
        params[slot, columns.TEMPERATURE], params[slot, columns.MIN_P] = temperature, min_p
        params[slot, columns.TOP_K], params[slot, columns.TOP_P] = top_k or vocab_size, top_p
    slots = torch.arange(len(logits))
    return [SamplingCase(logits, params, slots, slots)]


def top_k_case(dtype: torch.dtype, every: int = 1) -> SamplingCase:
    """A row for each top-k, or for every second or fewer, over logits that are neighbours among the numbers of `dtype`,
    in any order."""
    order = torch.arange(100, dtype=torch.int32 if dtype == torch.float32 else torch.int16)
    positive = (torch.tensor(8.0, dtype=dtype).view(order.dtype) + order).view(dtype)
    logits = torch.cat((positive, -positive))
    logits = logits[torch.randperm(len(logits), generator=torch.Generator().manual_seed(1))]
    top_ks = torch.arange(1, len(logits) + 1, every)
    slots = torch.arange(len(top_ks))
    params = torch.zeros(len(top_ks), columns.NUM_COLUMNS, dtype=torch.float64)
    params[:, columns.TEMPERATURE] = params[:, columns.TOP_P] = 1.0
    params[:, columns.TOP_K] = top_ks
    return SamplingCase(logits.expand(len(top_ks), -1), params, slots, slots)


def sampling_cases(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[SamplingCase]:
    """Rows of every kind over a small and an odd vocabulary of more than one chunk."""
    kinds: list[dict[int, float]] = [
        {columns.TEMPERATURE: 0.0},
        {columns.TEMPERATURE: 0.0, columns.TOP_K: 3, columns.TOP_P: 0.5},
        {columns.TEMPERATURE: 1.0},
        {columns.TEMPERATURE: 0.7, columns.TOP_K: 1},
        {columns.TEMPERATURE: 0.7, columns.TOP_K: 20},
        {columns.TEMPERATURE: 1.3, columns.TOP_P: 0.9},
        {columns.TEMPERATURE: 0.6, columns.TOP_P: 0.01},
        {columns.TEMPERATURE: 1.0, columns.MIN_P: 0.05},
        {columns.TEMPERATURE: 2.0, columns.MIN_P: 0.3, columns.TOP_K: 40, columns.TOP_P: 0.8},
    ]
    cases = []
    for vocab_size in (33, 9001):
        generator = torch.Generator().manual_seed(vocab_size)
        params = torch.zeros(len(kinds) + 2, columns.NUM_COLUMNS, dtype=torch.float64)
        params[:, columns.TOP_P], params[:, columns.TOP_K] = 1.0, vocab_size
        params[:, columns.KEY_LO : columns.KEY_HI + 1] = torch.randint(2**32, (len(params), 2), generator=generator)
        for slot, kind in enumerate(kinds):
            params[slot, list(kind)] = torch.tensor(list(kind.values()), dtype=torch.float64)
        slots = torch.randperm(len(kinds), generator=generator)
        logits = (torch.randn(len(slots), vocab_size, generator=generator) * 3).to(dtype)
        logits[:, 5] = -torch.inf
        positions = torch.randint(5000, slots.shape, generator=generator)
        tensors = (tensor.to(device) for tensor in (logits, params, slots, positions))
        cases.append(SamplingCase(*tensors))
    return cases


@dataclass(frozen=True, slots=True)
class SkinnyCase:
    """Operands of skinny products, with all that may come before and after one."""

    x: torch.Tensor
    residual: torch.Tensor
    norm_weight: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    gated: bool

    def products(self, num_rows: int, multiply: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Of the first rows, as they are, after a norm, after one of their residual sum, and after one that is kept;
        then this sum and the norm."""
        x, residual = self.x[:num_rows], self.residual[:num_rows]
        alone = unnormed_rows(x, None, self.norm_weight, 1e-6)
        added = unnormed_rows(x, residual, self.norm_weight, 1e-6)
        kept = unnormed_rows(x, residual, self.norm_weight, 1e-6).keeping_norm()
        products = [multiply(rows, self.weight, self.bias, gated=self.gated) for rows in (x, alone, added, kept)]
        assert kept.normed is not None
        return [*products, added.total, kept.normed]


def skinny_gemm_cases(
    shapes: Iterable[tuple[int, int]], num_rows: int, dtype: torch.dtype, **to: Any
) -> Iterator[SkinnyCase]:
    """`shapes`: outputs and inputs. `to`: where the tensors live."""
    for (num_outputs, num_inputs), (is_gated, has_bias) in itertools.product(
        shapes, ((False, True), (True, True), (True, False))
    ):
        outputs = 2 * num_outputs if is_gated else num_outputs
        weight = torch.randn(outputs, num_inputs, **to) / num_inputs**0.5
        x, residual = torch.randn(2, num_rows, num_inputs, **to).to(dtype)
        norm_weight, bias = torch.randn(num_inputs, **to).to(dtype), torch.randn(outputs, **to).to(dtype)
        yield SkinnyCase(x, residual, norm_weight, weight.to(dtype), bias if has_bias else None, is_gated)


@dataclass(frozen=True)
class LoraCase:
    y: torch.Tensor  # [T, outputs]
    x: torch.Tensor  # [T, inputs]
    matrices: SlotMatrices
    tokens: SlotTokens
    batch_invariant: bool


def lora_cases(dtype: torch.dtype, device: torch.device | str = "cpu") -> Iterator[LoraCase]:
    """Batches with tokens of no adapter, all of one, and more than one tile of a slot; slots without tokens."""
    for slots, num_inputs, sizes, rank, batch_invariant in (
        ([0], 24, (40,), 16, False),
        ([-1, 2, 0, -1, 2], 700, (72, 20, 20), 16, False),
        ([1] * 40 + [-1] * 3 + [0] * 17, 130, (64, 96), 32, True),
        ([3, 1, 0] * 200, 40, (33,), 16, False),
    ):
        num_slots, num_outputs = 4, sum(sizes)
        scales = torch.rand(num_slots, len(sizes)) + 0.5
        scales[0, -1] = 0.0  # nothing for this segment
        matrices = SlotMatrices(
            torch.randn(num_slots, len(sizes) * rank, num_inputs).div(num_inputs**0.5).to(device, dtype),
            torch.randn(num_slots, num_outputs, rank).div(rank**0.5).to(device, dtype),
            scales.to(device),
            output_tiles(sizes, torch.device(device)),
        )
        yield LoraCase(
            torch.randn(len(slots), num_outputs).to(device, dtype),
            torch.randn(len(slots), num_inputs).to(device, dtype),
            matrices,
            sort_tokens(torch.tensor(slots, device=device), num_slots),
            batch_invariant,
        )
