"""Triton kernels against their references in Triton's interpreter, on CPU tensors of odd shapes."""

import itertools
from collections.abc import Sequence
from typing import Any, get_args
from unittest import mock

import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from proa_engine.kernels import rms_norm, silu_and_mul
from proa_engine.kernels.attention import decode_attention, decode_plan, rotate_and_cache, store_kv
from proa_engine.kernels.attention.decode_plan import SPLIT_MULTIPLE, plan_decodes
from proa_engine.kernels.attention.prefill_attention import prefill_attention
from proa_engine.kernels.attention.store_kv import cache_rows
from proa_engine.kernels.launch import HOPPER_MULTIPROCESSORS
from proa_engine.kernels.prefetch import num_prefetched
from proa_engine.kernels.products import lora_matmul, skinny_gemm
from proa_engine.kernels.products.skinny_gemm import skinny_gemm_linear, skinny_gemm_linear_reference
from proa_engine.kernels.sampling import decode_inputs, drafts
from proa_engine.kernels.sampling.draw_tokens import draw_decodes, draw_tokens, draw_tokens_reference
from proa_engine.kernels.sampling.token_bitmask import token_bitmask
from proa_engine.kernels.sampling.token_limits import (
    limit_candidates,
    search_thresholds,
    token_limits,
    token_limits_reference,
)
from proa_engine.kernels.tilings import TILINGS
from support import invariance
from support.interpreter import TOLERANCE, close
from support.kernel_cases import (
    attention_case,
    limit_cases,
    lora_cases,
    mask_cases,
    padded_case,
    sampling_cases,
    skinny_gemm_cases,
    top_k_case,
)
from support.noise_kernel import chi_square_of_draws, exact_noise, noise_of, words_of_all_sizes
from support.prefetched_bytes import marked_bytes
from support.thorough import THOROUGH, combinations

ATTENTION_SHAPES: list[dict[str, Any]] = [
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 20, "block_size": 4},
    {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "has_sinks": True, "is_strided": True},
    {"num_heads": 2, "num_kv_heads": 1, "head_dim": 12, "has_sinks": True, "soft_cap": 2.0},
]
WIDE_HEADS: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 136}  # have tiles of their own


def check_norms(dtype: torch.dtype) -> None:
    for rows, size in ((1, 16), (5, 123), (3, 64)):
        x, residual = torch.randn(2, rows, size).to(dtype)
        weight = torch.randn(size).to(dtype)
        close(rms_norm.rms_norm(x, weight, 1e-6), rms_norm.rms_norm_reference(x, weight, 1e-6))
        expected = rms_norm.add_rms_norm_reference(x.clone(), residual.clone(), weight, 1e-6)
        for ours, theirs in zip(
            rms_norm.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6), expected, strict=True
        ):
            close(ours, theirs)
    heads = torch.randn(4, 9, 12).to(dtype)[:, 2:7]  # a slice of merged projections, normalised by head
    weight = torch.randn(12).to(dtype)
    close(rms_norm.rms_norm(heads, weight, 1e-6), rms_norm.rms_norm_reference(heads, weight, 1e-6))


def check_activate_and_mul(dtype: torch.dtype) -> None:
    for (rows, size), activation in itertools.product(((1, 7), (3, 1100)), get_args(silu_and_mul.ActivationName)):
        x = torch.randn(rows, 2 * size).mul(2).to(dtype)
        ours = silu_and_mul.activate_and_mul(x, activation)
        close(ours, silu_and_mul.activate_and_mul_reference(x, activation))


def check_skinny_gemm_linear(dtype: torch.dtype) -> None:
    with mock.patch.object(skinny_gemm, "num_multiprocessors", return_value=1):  # several rounds a program
        for case in skinny_gemm_cases(((6, 123), (30, 300)), 3, dtype):
            three = case.products(3, skinny_gemm_linear)
            for ours, theirs in zip(three, case.products(3, skinny_gemm_linear_reference), strict=True):
                close(ours, theirs)
            for ours, theirs in zip(case.products(1, skinny_gemm_linear), three, strict=True):
                assert torch.equal(ours, theirs[:1]), "a row has its bits whatever the others"


def check_rotate_and_cache(dtype: torch.dtype) -> None:
    tokens, block_size = 5, 4
    slots = torch.tensor([9, -1, 23, 0, 7])
    cases: list[tuple[int, int, int, int, bool, dict[str, Any]]] = [
        (2, 1, 2, 2, True, {}),
        (3, 3, 20, 20, False, {}),
        (14, 2, 16, 16, True, {"norm_values": True}),
        (3, 1, 12, 12, True, {"interleaved": True}),
        (2, 2, 20, 6, False, {"interleaved": True}),
        (5, 1, 20, 10, True, {"norm_values": True}),
        (3, 0, 16, 16, True, {"norm_values": True}),  # a layer that only reads the cache of another
    ]
    for num_heads, num_kv_heads, dim, rotary_dim, has_norms, options in cases:
        heads = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim).to(dtype)
        cos, sin = torch.randn(2, tokens, rotary_dim // 2)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        q_weight, k_weight = torch.randn(2, dim).to(dtype)
        norms = (q_weight, k_weight, 1e-6) if has_norms else None
        ours = torch.full((2, 6, num_kv_heads, block_size, dim), 3.0, dtype=dtype)
        theirs = ours.clone()
        if dim == 20:
            ours = ours.transpose(0, 1).contiguous().transpose(0, 1)  # a block's keys and values lie side by side
        (keys, values), (their_keys, their_values) = ours, theirs
        query = rotate_and_cache.rotate_and_cache(heads, norms, cos, sin, keys, values, slots, **options)
        rows = cache_rows(slots, their_keys.shape)
        their_query = rotate_and_cache.rotate_and_cache_reference(
            heads, norms, cos, sin, their_keys, their_values, rows, **options
        )
        close(query, their_query)
        close(ours, theirs)


def check_store_kv(dtype: torch.dtype) -> None:
    tokens, block_size = 5, 4
    slots = torch.tensor([9, -1, 23, 0, 7])
    for num_kv_heads, dim in ((1, 2), (3, 20), (9, 16)):
        key = torch.randn(tokens, 2 * num_kv_heads, dim).to(dtype)[:, :num_kv_heads]  # a slice of merged heads
        value = torch.randn(num_kv_heads, tokens, dim).to(dtype).transpose(0, 1)
        ours = torch.full((2, 6, num_kv_heads, block_size, dim), 3.0, dtype=dtype)
        theirs = ours.clone()
        store_kv.store_kv(key, value, ours[0], ours[1], slots, None)
        rows = cache_rows(slots, theirs[0].shape)
        store_kv.store_kv(key, value, theirs[0], theirs[1], slots, rows)
        assert torch.equal(ours, theirs)


def check_decode_plan(dtype: torch.dtype) -> None:
    """Every token that a row's queries attend to is in one item, a row's items are alike, longer ones come first."""
    for num_rows, most_tokens, num_kv_heads, window, width in (
        (1, 600, 8, None, 1),
        (3, 5000, 4, None, 5),
        (33, 200, 8, 70, 1),
        (70, 9000, 3, None, 1),
        (70, 900, 1, 140, 3),
        (600, 2000, 40, None, 1),
    ):
        seq_lens = torch.randint(most_tokens, (num_rows,), dtype=torch.int32)
        seq_lens[0] = most_tokens
        seq_lens[num_rows // 2 + 1 :: 7] = 0
        with mock.patch.object(decode_plan, "num_multiprocessors", return_value=HOPPER_MULTIPROCESSORS):
            plan = plan_decodes(seq_lens, num_rows, num_kv_heads, window, width)
        assert (plan.arrived == 0).all()
        items = [item for item in zip(*plan.items.tolist(), strict=True) if item[0] >= 0]
        assert (plan.items[0, len(items) :] == -1).all()
        assert (plan.items[1, len(items) :] == len(items)).all()
        lengths = []
        for row, seq_len in enumerate(seq_lens.tolist()):
            first = 0 if window is None else max(seq_len - window - width + 1, 0) // SPLIT_MULTIPLE * SPLIT_MULTIPLE
            first_item = next(index for index, item in enumerate(items) if item[0] == row)
            num_parts = items[first_item][5]
            parts = items[first_item : first_item + num_parts]
            starts, ends = [part[1] for part in parts], [part[2] for part in parts]
            assert [item for item in items if item[0] == row] == parts
            assert {(seq_len, first_item, num_parts)} == {part[3:] for part in parts}
            assert [*starts, seq_len] == [first, *ends]
            assert all(start % SPLIT_MULTIPLE == 0 for start in starts)
            assert all(start < end for start, end in itertools.pairwise([*starts, seq_len])) or seq_len == 0
            assert len({end - start for start, end in itertools.pairwise(starts)}) <= 1
            lengths.append((first_item, starts[1] - first if num_parts > 1 else seq_len - first))
        rounded = [-(-length // SPLIT_MULTIPLE) for _, length in sorted(lengths)]
        assert rounded == sorted(rounded, reverse=True)
        assert num_rows > 9 or len(items) > num_rows


def check_decode_attention(dtype: torch.dtype) -> None:
    lens = [(1, 1), (1, 16), (1, 37), (1, 300), (1, 129)]
    for shape, window in combinations(ATTENTION_SHAPES, (None, 140)):
        case = attention_case(lens, window=window, dtype=dtype, **shape)
        seq_lens = torch.cat((case.metadata.seq_lens, torch.zeros(2, dtype=torch.int32)))  # two rows of padding
        query = torch.cat((case.query, case.query[:2]))
        block_table = torch.cat((case.metadata.tables[0].block_table, case.metadata.tables[0].block_table[:2]))
        plan = plan_decodes(seq_lens, len(seq_lens), case.key_cache.shape[1], window)
        assert window is not None or (plan.items[0] == 3).sum() > 1
        for _ in range(2):  # two layers share a plan
            out = torch.full_like(query, torch.nan)
            decode_attention.decode_attention(
                query, case.key_cache, case.value_cache, block_table, out, plan, 0.25, **case.scores
            )
            close(out[: len(lens)].float(), case.expected, TOLERANCE[dtype])
            assert (out[len(lens) :] == 0).all()


def check_attention_of_wide_decodes(dtype: torch.dtype) -> None:
    """As wide as one program computes and wider; with splits that begin behind some of a row's query tokens, with rows
    of padding, and with tokens of padding before a request's beginning."""
    first, second, third, with_sinks, _ = ATTENTION_SHAPES
    assert_wide_decodes(3, (3, 16, 150, 129), first, None, dtype)
    assert_wide_decodes(5, (200, 141, 5), second, 140, dtype)
    assert_wide_decodes(2, (130, 300), with_sinks, None, dtype)
    with mock.patch.object(decode_attention, "MAX_TILE", 16 * 16):
        assert_wide_decodes(19, (19, 131), third, None, dtype)


def assert_wide_decodes(
    width: int, seq_lens: Sequence[int], shape: dict[str, Any], window: int | None, dtype: torch.dtype
) -> None:
    case = attention_case([(width, seq_len) for seq_len in (*seq_lens, width)], window=window, dtype=dtype, **shape)
    lengths, block_table = case.metadata.seq_lens.clone(), case.metadata.tables[0].block_table
    caches = case.key_cache, case.value_cache
    lengths[-1] = 0
    plan = plan_decodes(lengths, len(lengths), case.key_cache.shape[1], window, width)
    out = torch.full_like(case.query, torch.nan)
    for _ in range(2):  # two layers share a plan
        decode_attention.decode_attention(case.query, *caches, block_table, out, plan, 0.25, **case.scores)
        close(out[:-width].float(), case.expected[:-width], TOLERANCE[dtype])
        assert (out[-width:] == 0).all()
    case = padded_case(attention_case([(2, 2), (2, 2)], window=window, dtype=dtype, **shape), width)
    caches = case.key_cache, case.value_cache
    lengths, block_table = case.metadata.seq_lens, case.metadata.tables[0].block_table
    plan = plan_decodes(lengths, len(lengths), case.key_cache.shape[1], window, width)
    ours, invariant = torch.full((2, *case.query.shape), torch.nan, dtype=dtype)
    decode_attention.decode_attention(case.query, *caches, block_table, ours, plan, 0.25, **case.scores)
    close(ours.float(), case.expected, TOLERANCE[dtype])
    batch = case.metadata.query_start_loc, lengths, block_table, invariant
    prefill_attention(case.query, *caches, *batch, 0, 0.25, window, batch_invariant=True, **case.scores)
    close(invariant.float(), case.expected, TOLERANCE[dtype])


def check_attention_of_blocks(dtype: torch.dtype) -> None:
    """All query tokens of a row attend to all of it: as wide as one program computes and wider, in splits, beside rows
    of padding and of fewer tokens than others."""
    lens = [(1, 1), (2, 40), (3, 150), (5, 129), (5, 5)]
    for shape, limit in zip(ATTENTION_SHAPES, itertools.cycle((decode_attention.MAX_TILE, 16 * 16)), strict=False):
        case = padded_case(attention_case(lens, causal=False, dtype=dtype, **shape), 5)
        lengths = torch.cat((case.metadata.seq_lens, torch.zeros(1, dtype=torch.int32)))
        table, query = case.metadata.tables[0].block_table, torch.cat((case.query, case.query[:5]))
        plan = plan_decodes(lengths, len(lengths), case.key_cache.shape[1], None, 5, causal=False)
        assert (plan.items[0] == 2).sum() > 1
        out = torch.full_like(query, torch.nan)
        with mock.patch.object(decode_attention, "MAX_TILE", limit):
            for _ in range(2):  # two layers share a plan
                caches = case.key_cache, case.value_cache
                decode_attention.decode_attention(
                    query, *caches, torch.cat((table, table[:1])), out, plan, 0.25, **case.scores
                )
                is_token = case.metadata.tables[0].slot_mapping >= 0
                close(out[:-5][is_token].float(), case.expected[is_token], TOLERANCE[dtype])
                assert not out.isnan().any()
                assert (out[-5:] == 0).all()


def check_prefetch(dtype: torch.dtype) -> None:
    """The programs' shares are whole chunks of 256 bytes, each of the weight's first ones; off, there is nothing."""
    for num_bytes, num_programs, most_bytes, expected in (
        (10_000, 3, 1 << 20, 39 * 256),
        (10_000, 1, 5000, 19 * 256),
        (512, 7, 1 << 20, 512),
    ):
        marked = marked_bytes(torch.zeros(num_bytes, dtype=torch.uint8), num_programs, most_bytes)
        assert marked[:expected].all()
        assert not marked[expected:].any()
    assert num_prefetched(marked) == num_prefetched(None) == 0


def check_attention_of_padded_decodes(dtype: torch.dtype) -> None:
    """A row's padding does not attend to keys before its own query tokens' window."""
    for shape, window in itertools.product(ATTENTION_SHAPES[:2], (2, 20)):
        case = padded_case(attention_case([(1, 40), (3, 150), (2, 2), (5, 31)], window=window, dtype=dtype, **shape), 5)
        caches, metadata, num_kv_heads = (case.key_cache, case.value_cache), case.metadata, case.key_cache.shape[1]
        lengths, (table,) = metadata.seq_lens, metadata.tables
        plan = plan_decodes(lengths, len(lengths), num_kv_heads, window, 5, table.slot_mapping)
        ours, invariant = torch.full((2, *case.query.shape), torch.nan, dtype=dtype)
        decode_attention.decode_attention(case.query, *caches, table.block_table, ours, plan, 0.25)
        close(ours.float(), case.expected, TOLERANCE[dtype])
        batch = metadata.query_start_loc, lengths, table.block_table, invariant
        prefill_attention(
            case.query, *caches, *batch, 0, 0.25, window, batch_invariant=True, slot_mapping=table.slot_mapping
        )
        close(invariant.float(), case.expected, TOLERANCE[dtype])


def check_prefill_attention(dtype: torch.dtype) -> None:
    lens = [(1, 33), (1, 5), (3, 3), (20, 50), (70, 90)]
    for shape, window, num_decodes in combinations((*ATTENTION_SHAPES, WIDE_HEADS), (None, 18), (0, 2)):
        case = attention_case(lens, window=window, dtype=dtype, **shape)
        metadata = case.metadata
        batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
        out = torch.full_like(case.query, torch.nan)
        prefill_attention(
            case.query, case.key_cache, case.value_cache, *batch, out, num_decodes, 0.25, window, **case.scores
        )
        close(out[num_decodes:].float(), case.expected[num_decodes:], TOLERANCE[dtype])
        assert out[:num_decodes].isnan().all()


def check_prefill_attention_in_little_memory(dtype: torch.dtype) -> None:
    """With the tilings of GPUs whose shared memory has no room for wide tiles."""
    with mock.patch("proa_engine.kernels.attention.prefill_attention.tilings_of", return_value=TILINGS[89]):
        for head_dim in (136, 264):
            case = attention_case([(3, 3), (20, 50)], num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
            metadata = case.metadata
            batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
            out = torch.full_like(case.query, torch.nan)
            prefill_attention(case.query, case.key_cache, case.value_cache, *batch, out, 0, 0.25, None)
            close(out.float(), case.expected, TOLERANCE[dtype])


def check_attention_within_images(dtype: torch.dtype) -> None:
    """As a chunk behind a hit within an image, of one token too; images side by side, and wider than a window."""
    lens = [(1, 33), (1, 5), (3, 3), (20, 50)]
    images = [(1, 2, 5), (2, 0, 3), (3, 16, 38), (3, 38, 49)]
    for shape, window in zip(ATTENTION_SHAPES[:2], (None, 18), strict=True):
        case = attention_case(lens, window=window, images=images, dtype=dtype, **shape)
        metadata = case.metadata
        out = torch.full_like(case.query, torch.nan)
        prefill_attention(
            case.query,
            case.key_cache,
            case.value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.tables[0].block_table,
            out,
            2,
            0.25,
            window,
            ends=metadata.ends,
            **case.scores,
        )
        close(out[2:].float(), case.expected[2:], TOLERANCE[dtype])


def check_attention_of_head_sizes(dtype: torch.dtype) -> None:
    for head_dim in (80, 112, 192, 256, 512):
        case = attention_case([(1, 37), (1, 5), (9, 40)], head_dim=head_dim, scale=0.1, dtype=dtype)
        metadata, caches = case.metadata, (case.key_cache, case.value_cache)
        batch = metadata.seq_lens, metadata.tables[0].block_table
        plan = plan_decodes(metadata.seq_lens, 2, 2, None)
        out = torch.full_like(case.query, torch.nan)
        decode_attention.decode_attention(case.query, *caches, batch[1], out, plan, 0.1)
        prefill_attention(case.query, *caches, metadata.query_start_loc, *batch, out, 2, 0.1, None)
        close(out.float(), case.expected, TOLERANCE[dtype])


def check_invariant_products(dtype: torch.dtype) -> None:
    with mock.patch.object(InterpreterBuilder, "create_dot", ordered_dot):
        invariance.check_products(70, 90, dtype, TOLERANCE[dtype])


def check_invariant_attention(dtype: torch.dtype) -> None:
    with mock.patch.object(InterpreterBuilder, "create_dot", ordered_dot):
        for shape, window in zip((*ATTENTION_SHAPES[:2], WIDE_HEADS), (None, 40, None), strict=True):
            is_first = shape is ATTENTION_SHAPES[0]
            invariance.check_attention(90, dtype, TOLERANCE[dtype], window=window, has_image=is_first, **shape)
        scores = {"sinks": torch.randn(4), "soft_cap": 2.0}
        invariance.check_attention(70, dtype, TOLERANCE[dtype], window=None, scores=scores, **ATTENTION_SHAPES[0])


def ordered_dot(_builder: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
    """As tensor cores have it, each element of a product is added up in the same order wherever in the tile it is; the
    library that the interpreter multiplies by treats a tile's last rows otherwise."""
    total = d.data.copy()
    for k in range(a.data.shape[1]):
        total += a.data[:, k, None].astype(total.dtype) * b.data[None, k, :].astype(total.dtype)
    return TensorHandle(total, d.dtype.scalar)


def check_decode_inputs(dtype: torch.dtype) -> None:
    token_ids = torch.randint(500, (6, 90), dtype=torch.int32)
    block_tables = torch.randint(40, (3, 6, 23), dtype=torch.int32)
    for width, counts in ((1, [1, 1, 1, 0]), (3, [1, 2, 3, 0])):
        rows = torch.tensor([[5, 1, 2, 0], [89, 3, 37, 0], counts])
        deltas = -torch.arange(6) if width > 1 else None
        ours = decode_inputs.decode_inputs(rows, token_ids, block_tables, 4, width, deltas)
        theirs = decode_inputs.decode_inputs_reference(rows, token_ids, block_tables, 4, width, deltas)
        for name in ("input_ids", "positions", "seq_lens", "slot_mappings"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for row, seq_len in enumerate(theirs.seq_lens.tolist()):
            used = -(-seq_len // 4)
            assert torch.equal(ours.block_tables[:, row, :used], theirs.block_tables[:, row, :used])


def check_propose_ngrams(_dtype: torch.dtype) -> None:
    for rows, length, vocabulary, width, (min_ngram, max_ngram) in (
        (3, 1, 3, 2, (1, 2)),
        (5, 90, 4, 5, (2, 4)),
        (2, 2 * drafts.BLOCK + 7, 50, 3, (1, 3)),
    ):
        lengths, slots = torch.randint(1, length + 1, (7,)), torch.randperm(7)[:rows]
        num_tokens = torch.randint(0, width + 2, (rows,))
        ends = torch.where(num_tokens > 0, lengths[slots] + num_tokens + torch.randint(-2, 4, (rows,)), 0)
        ours = [
            torch.stack((slots, ends, num_tokens)),
            torch.randint(0, vocabulary, (7, length + width), dtype=torch.int32),
            lengths,
            torch.zeros(7, width, dtype=torch.int64),
        ]
        theirs = [tensor.clone() for tensor in ours]
        drafts.propose_ngrams(*ours, min_ngram=min_ngram, max_ngram=max_ngram)
        drafts.propose_ngrams_reference(*theirs, min_ngram=min_ngram, max_ngram=max_ngram)
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def check_accept_drafts(_dtype: torch.dtype) -> None:
    for num_rows, width in ((1, 1), (5, 3), (6, 4)):
        num_samples = torch.randint(1, width + 2, (num_rows,))
        slots = torch.randperm(9)[:num_rows]
        proposed = torch.randint(-1, 2, (9, width))
        proposed[(proposed == drafts.NONE).cumsum(1) > 0] = drafts.NONE
        proposed[slots] = proposed[slots].masked_fill(torch.arange(width) >= num_samples[:, None] - 1, drafts.NONE)
        token_ids = torch.randint(0, 2, (int(num_samples.sum()),))
        first_samples = num_samples.cumsum(0) - num_samples
        ours, theirs = torch.randint(1, 99, (9,)).repeat(2, 1)
        arguments = token_ids, slots.repeat_interleave(num_samples), first_samples, proposed
        counts = drafts.accept_drafts(*arguments, ours)
        assert torch.equal(counts, drafts.accept_drafts_reference(*arguments, theirs))
        assert torch.equal(ours, theirs)


def check_token_bitmask(dtype: torch.dtype) -> None:
    for each in {dtype, torch.bfloat16}:  # stores no computed value, so the interpreter's bfloat16 is right
        for case in mask_cases(each):
            token_bitmask(case.logits, case.rows, case.bits)
            assert torch.equal(case.logits, case.expected)


def check_token_limits(dtype: torch.dtype) -> None:
    for each in {dtype, torch.bfloat16}:  # only compares the logits, so the interpreter's bfloat16 is right
        for case in (*sampling_cases(each), top_k_case(each, every=1 if THOROUGH else 23)):
            case.check_limits(token_limits(case.logits, case.params, case.slots))
            case.check_limits(token_limits_reference(case.logits, case.params, case.slots))


def check_limit_candidates(dtype: torch.dtype) -> None:
    """All logits above the bound are candidates, and a search among them finds what a search of the row does."""
    num_covered = 0
    for case in limit_cases(dtype):
        arguments = case.logits, case.params, case.slots
        candidates, figures = limit_candidates(*arguments)
        thresholds = search_thresholds(*arguments, candidates, figures)
        for logits, found, bound, threshold in zip(
            case.logits, candidates, figures[:, 1].amax(1), thresholds, strict=True
        ):
            assert torch.equal(logits[logits > bound].sort().values, found[found > bound].sort().values)
            num_covered += bool(threshold > bound)
        case.check_limits(thresholds)
        case.check_limits(token_limits_reference(*arguments))
        figures[:, 1] = torch.inf
        assert torch.equal(search_thresholds(*arguments, candidates, figures), thresholds)
    assert 0 < num_covered < len(thresholds)


def check_draw_tokens(dtype: torch.dtype) -> None:
    for case in sampling_cases(dtype):
        arguments = case.logits, case.params, case.slots, case.positions
        for has_limits in (False, True):
            ours = draw_tokens(*arguments, has_limits=has_limits)
            assert torch.equal(ours, draw_tokens_reference(*arguments, has_limits=has_limits))


def check_noise(dtype: torch.dtype) -> None:
    """The same for every type of logits."""
    words = words_of_all_sizes()
    torch.testing.assert_close(noise_of(words).double(), exact_noise(words), atol=1e-5, rtol=0)
    assert chi_square_of_draws(20_000, "cpu") < 24.3


def check_draw_decodes(dtype: torch.dtype) -> None:
    """The last row is padding, which has no tokens."""
    for case in sampling_cases(dtype):
        rows = torch.stack([case.slots, case.positions, torch.ones_like(case.slots)])
        rows[:, -1] = 0
        token_ids = torch.full((len(case.params), 5001), -1, dtype=torch.int32)
        drawn = draw_decodes(case.logits, case.params, rows, token_ids)
        assert torch.equal(drawn, draw_tokens_reference(case.logits, case.params, *rows[:2], has_limits=True))
        written = torch.full_like(token_ids, -1).index_put_((rows[0, :-1], rows[1, :-1]), drawn[:-1].int())
        assert torch.equal(token_ids, written)


def check_lora(dtype: torch.dtype) -> None:
    for case in lora_cases(dtype):
        ours, theirs = case.y.clone(), case.y.clone()
        lora_matmul.add_lora(ours, case.x, case.matrices, case.tokens, batch_invariant=case.batch_invariant)
        lora_matmul.add_lora_reference(theirs, case.x, case.matrices, case.tokens)
        close(ours, theirs)
