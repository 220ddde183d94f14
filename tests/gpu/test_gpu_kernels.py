"""The Triton kernels on a GPU against their references, over shapes drawn at random and those of real models.

What a kernel allocates begins as NaN, so that an element that it never wrote, or read too early, shows.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from proa_engine.kernels import prefetch
from proa_engine.kernels.attention import decode_plan
from proa_engine.kernels.attention.paged_attention import paged_attention, plan_attention
from proa_engine.kernels.attention.rotate_and_cache import rotate_and_cache
from proa_engine.kernels.rms_norm import add_rms_norm, rms_norm
from proa_engine.kernels.sampling.decode_inputs import decode_inputs, decode_inputs_reference
from proa_engine.kernels.sampling.drafts import accept_drafts, propose_ngrams
from proa_engine.kernels.sampling.draw_tokens import draw_decodes, draw_tokens, draw_tokens_reference
from proa_engine.kernels.sampling.token_bitmask import token_bitmask
from proa_engine.kernels.sampling.token_limits import limit_candidates, search_thresholds, token_limits
from proa_engine.kernels.silu_and_mul import ActivationName, activate_and_mul
from support.kernel_cases import (
    attend,
    attention_case,
    dense_attention,
    limit_cases,
    mask_cases,
    padded_case,
    sampling_cases,
    top_k_case,
)
from support.noise_kernel import chi_square_of_draws, exact_noise, noise_of, words_of_all_sizes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
ATTENTION_SHAPES: list[dict[str, Any]] = [
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
    {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    {"num_heads": 14, "num_kv_heads": 2, "head_dim": 64},
    {"num_heads": 7, "num_kv_heads": 1, "head_dim": 64, "block_size": 8},
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 80},
    {"num_heads": 40, "num_kv_heads": 2, "head_dim": 96, "block_size": 32},
    {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256},
    {"num_heads": 16, "num_kv_heads": 2, "head_dim": 512, "is_strided": True},
    {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "has_sinks": True},
    {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "soft_cap": 5.0},
]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float().cpu(), theirs.float().cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 123), (300, 4096), (7, 896), (3, 8192)])
def test_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    close(rms_norm(x.cuda(), weight.cuda(), 1e-6), rms_norm(x, weight, 1e-6))
    normed, total = add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-6)
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-6)
    close(normed, expected)
    close(total, expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (37, 3072), (4, 14336)])
@pytest.mark.parametrize("activation", get_args(ActivationName))
def test_activate_and_mul(activation: ActivationName, rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 2 * size).mul(4).to(dtype)
    close(activate_and_mul(x.cuda(), activation), activate_and_mul(x, activation))


def test_relaunches_with_other_alignments_types_and_sizes() -> None:
    """Each launch after a key's first bypasses Triton, so every combination is launched three times, in two orders."""
    cases = [(dtype, offset, size) for dtype in DTYPES for offset in (0, 1, 8) for size in (1, 16, 1000, 1024)]
    for dtype, offset, size in [*cases, *cases, *reversed(cases)]:
        x = torch.randn(3 * size + offset).to(dtype)
        residual, weight = torch.randn(3, size).to(dtype), torch.randn(size + offset).to(dtype)[offset:]
        rows, rows_cuda = x[offset:].view(3, size), x.cuda()[offset:].view(3, size)
        weight_cuda = torch.cat((weight.new_zeros(offset), weight)).cuda()[offset:]
        normed, total = add_rms_norm(rows_cuda, residual.cuda(), weight_cuda, 1e-6)
        expected, expected_total = add_rms_norm(rows, residual, weight, 1e-6)
        close(normed, expected)
        close(total, expected_total)


@pytest.mark.parametrize(("rotated", "is_interleaved"), [(1.0, False), (0.5, False), (1.0, True), (0.25, True)])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
def test_rotation_norms_and_cache_writes(
    shape: dict[str, Any], dtype: torch.dtype, has_norms: bool, rotated: float, is_interleaved: bool
) -> None:
    num_heads, num_kv_heads, dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]
    block_size, tokens = shape.get("block_size", 16), 37
    heads = torch.randn(tokens, num_heads + 2 * num_kv_heads, dim).to(dtype)
    angles = torch.randn(tokens, int(dim * rotated) // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    q_weight, k_weight = torch.randn(2, dim).to(dtype)
    norms = (q_weight, k_weight, 1e-6) if has_norms else None
    gpu_norms = (q_weight.cuda(), k_weight.cuda(), 1e-6) if has_norms else None
    slots = torch.randperm(10 * block_size)[:tokens]
    slots[5] = -1
    theirs = torch.full((2, 10, num_kv_heads, block_size, dim), 3.0, dtype=dtype)
    ours = theirs.cuda()
    options: dict[str, Any] = {"interleaved": is_interleaved, "norm_values": has_norms and is_interleaved}
    arguments: list[Any] = [heads, norms, cos, sin, *theirs, slots]
    on_gpu: list[Any] = [heads.cuda(), gpu_norms, cos.cuda(), sin.cuda(), *ours, slots.cuda()]
    close(rotate_and_cache(*on_gpu, **options), rotate_and_cache(*arguments, **options))
    close(ours, theirs)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_attention_of_random_batches(shape: dict[str, Any], dtype: torch.dtype, window: int | None, seed: int) -> None:
    rows = random.Random(seed)
    lens = [(1, rows.choice([1, 16, 17, rows.randint(1, 3000)])) for _ in range(rows.randint(0, 12))]
    for _ in range(rows.randint(0 if lens else 1, 4)):
        query_len = rows.randint(2, 300)
        lens.append((query_len, query_len + rows.choice([0, 1, rows.randint(0, 900)])))
    case = attention_case(lens, window=window, scale=0.1, dtype=dtype, device="cuda", **shape)
    close(attend(case, window, 0.1), case.expected)


@pytest.mark.parametrize("window", [None, 100, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "is_strided": True},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 128, "block_size": 32, "has_sinks": True},
        {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "has_sinks": True},
        {"num_heads": 6, "num_kv_heads": 6, "head_dim": 64, "block_size": 64},
    ],
)
@pytest.mark.parametrize(
    "lens", [[(4099, 4099)], [(4096, 4200), (4500, 6001)], [(1, 5), (1, 3000), (7, 7), (300, 4001)]]
)
def test_attention_of_long_and_of_short_prompts(
    lens: list[tuple[int, int]], shape: dict[str, Any], dtype: torch.dtype, window: int | None
) -> None:
    """The tilings of Hopper's kernel."""
    case = attention_case(lens, window=window, scale=0.1, dtype=dtype, device="cuda", **shape)
    ours = attend(case, window, 0.1)
    close(ours, case.expected)
    assert torch.equal(attend(case, window, 0.1), ours)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
def test_padding_of_prompts_gets_zeros_and_empty_requests_nothing(
    shape: dict[str, Any], dtype: torch.dtype, window: int | None
) -> None:
    """As steps whose graphs are captured: empty requests behind the decodes and behind the prompts, then padding."""
    lens, num_padding = [(1, 40), (33, 50), (2, 600)], 75
    case = attention_case(lens, window=window, scale=0.1, dtype=dtype, device="cuda", **shape)
    starts, seq_lens = [0, 1, 1, 34, 36, 36, 36 + num_padding], [40, 0, 50, 600, 0, 0]
    rows = torch.tensor([0, 1, 1, 2, 2, 2], device="cuda")
    metadata = case.metadata
    table = replace(metadata.tables[0], block_table=metadata.tables[0].block_table[rows])
    with torch.device("cuda"):
        metadata = replace(
            metadata,
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            tables=(table,),
        )
    padding = torch.randn(num_padding, *case.query.shape[1:], dtype=dtype, device="cuda")
    padded = replace(case, query=torch.cat((case.query, padding)), metadata=metadata)
    ours = attend(padded, window, 0.1)
    close(ours[:-num_padding], case.expected)
    assert not ours[-num_padding:].any()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
@pytest.mark.parametrize("width", [2, 5, 33])
def test_attention_of_wide_decodes(shape: dict[str, Any], dtype: torch.dtype, window: int | None, width: int) -> None:
    lens = [(width, width + n) for n in (0, 1, 16, 2900, 127, 128, 640)]
    case = attention_case(lens, window=window, scale=0.1, dtype=dtype, device="cuda", **shape)
    for _ in range(20):  # the split that finishes last varies
        close(attend(case, window, 0.1, width), case.expected)


@pytest.mark.parametrize("window", [1, 100, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
def test_attention_of_padded_decodes(shape: dict[str, Any], dtype: torch.dtype, window: int) -> None:
    lens = [(1, 40), (3, 1500), (2, 2), (5, 31), (4, 2900)]
    case = padded_case(attention_case(lens, window=window, scale=0.1, dtype=dtype, device="cuda", **shape), 5)
    close(attend(case, window, 0.1, 5), case.expected)


@pytest.mark.parametrize("window", [None, 100, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
def test_tokens_of_an_image_attend_to_all_of_it(shape: dict[str, Any], dtype: torch.dtype, window: int | None) -> None:
    """As Gemma 3's images of 256 tokens: side by side, and behind a hit within one, of one token too."""
    lens = [(1, 900), (1, 256), (256, 256), (700, 1500), (300, 301)]
    images = [(1, 0, 256), (2, 0, 256), (3, 700, 956), (3, 956, 1212), (4, 0, 256)]
    case = attention_case(lens, window=window, images=images, scale=0.1, dtype=dtype, device="cuda", **shape)
    close(attend(case, window, 0.1), case.expected)


@pytest.mark.parametrize("query_len", [1, 33])
def test_attention_reaches_over_128k_tokens(query_len: int) -> None:
    length, block_size, dtype = 131_072, 16, torch.bfloat16
    key, value = torch.randn(2, length, 2, 128, device="cuda").to(dtype)
    query = torch.randn(query_len, 8, 128, device="cuda").to(dtype)
    blocks = torch.randperm(length // block_size, device="cuda")
    caches = torch.empty(2, len(blocks), 2, block_size, 128, dtype=dtype, device="cuda")
    for cache, tokens in zip(caches, (key, value), strict=True):
        cache[blocks] = tokens.view(-1, block_size, 2, 128).transpose(1, 2)
    batch = (
        torch.tensor([0, query_len], dtype=torch.int32, device="cuda"),
        torch.tensor([length], dtype=torch.int32, device="cuda"),
        blocks[None].int(),
    )
    num_decodes = int(query_len == 1)
    plan = plan_attention(*batch, num_decodes, caches[0].shape, None)
    out = paged_attention(query, caches[0], caches[1], *batch, plan, num_decodes=num_decodes, scale=0.1)
    close(out, dense_attention(query, key, value, 0.1, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_cut_into_many_splits_equal_those_in_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated, because the split that finishes last varies; it merges all splits in the same order."""
    lens = [(1, n) for n in (1, 127, 128, 129, 5000, 2500, 900)]
    case = attention_case(lens, num_heads=16, num_kv_heads=8, head_dim=128, dtype=dtype, device="cuda")
    split = attend(case)
    for _ in range(200):
        assert torch.equal(attend(case), split), "the order of merging is fixed"
    monkeypatch.setattr(decode_plan, "SPLIT_MULTIPLE", 1 << 20)
    close(attend(case), split)


def test_a_weight_that_programs_without_work_read_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "device": "cuda"}
    case = attention_case([(1, 600), (1, 40)], dtype=torch.bfloat16, **sizes)
    expected, weight = attend(case), torch.randn(1000, 1000, device="cuda")
    for most_bytes in (256, 1 << 20, 1 << 30):
        monkeypatch.setattr(prefetch, "MOST_BYTES", most_bytes)
        assert torch.equal(attend(case, following=weight), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 16])
def test_blocks_attend_to_all_of_them(dtype: torch.dtype, width: int) -> None:
    lens = [(width, n) for n in (width, 127, 129, 5000, 900)]
    case = attention_case(lens, num_heads=16, num_kv_heads=8, head_dim=128, causal=False, dtype=dtype, device="cuda")
    close(attend(case, decode_width=width, causal=False), case.expected)


def test_inputs_of_decodes() -> None:
    token_ids = torch.randint(500, (6, 3000), dtype=torch.int32)
    block_tables = torch.randint(40, (3, 6, 2100), dtype=torch.int32)
    for width, counts in ((1, [1, 1, 1, 0]), (5, [5, 1, 3, 0])):
        rows = torch.tensor([[5, 0, 2, 0], [2801, 1, 38, 0], counts])
        deltas = -torch.arange(6) if width > 1 else None
        on_gpu = None if deltas is None else deltas.cuda()
        ours = decode_inputs(rows.cuda(), token_ids.cuda(), block_tables.cuda(), 4, width, on_gpu)
        theirs = decode_inputs_reference(rows, token_ids, block_tables, 4, width, deltas)
        for name in ("input_ids", "positions", "seq_lens", "slot_mappings"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name
        for row, seq_len in enumerate(theirs.seq_lens.tolist()):
            used = -(-seq_len // 4)
            assert torch.equal(ours.block_tables[:, row, :used].cpu(), theirs.block_tables[:, row, :used])


def test_drafts_and_their_acceptance() -> None:
    for vocabulary, width in ((2, 1), (4, 5), (3, 8)):
        token_ids = torch.randint(vocabulary, (9, 5000), dtype=torch.int32)
        lengths, slots = torch.randint(1, 4900, (9,)), torch.randperm(9)[:6]
        num_tokens = torch.randint(width + 2, (6,))
        rows = torch.stack((slots, lengths[slots] + num_tokens + 2, num_tokens))
        theirs = [rows, token_ids, lengths, torch.zeros(9, width, dtype=torch.int64)]
        ours = [tensor.cuda() for tensor in theirs]
        propose_ngrams(*ours, min_ngram=1, max_ngram=4)
        propose_ngrams(*theirs, min_ngram=1, max_ngram=4)
        num_samples = num_tokens[num_tokens > 0]
        samples = torch.randint(vocabulary, (int(num_samples.sum()),))
        of_samples = slots[num_tokens > 0].repeat_interleave(num_samples)
        first = num_samples.cumsum(0) - num_samples
        theirs.append(accept_drafts(samples, of_samples, first, theirs[3], theirs[2]))
        ours.append(accept_drafts(samples.cuda(), of_samples.cuda(), first.cuda(), ours[3], ours[2]))
        for our, their in zip(ours, theirs, strict=True):
            assert torch.equal(our.cpu(), their)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_of_tokens(dtype: torch.dtype) -> None:
    for case in mask_cases(dtype):
        logits = case.logits.cuda()
        token_bitmask(logits, case.rows.cuda(), case.bits.cuda())
        assert torch.equal(logits.cpu(), case.expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_choice_of_tokens(dtype: torch.dtype) -> None:
    for case in sampling_cases(dtype):
        arguments = case.logits, case.params, case.slots, case.positions
        on_gpu = [tensor.cuda() for tensor in arguments]
        case.check_limits(token_limits(*on_gpu[:3]))
        for has_limits in (False, True):
            ours = draw_tokens(on_gpu[0], on_gpu[1], on_gpu[2], on_gpu[3], has_limits=has_limits).cpu()
            theirs = draw_tokens_reference(*arguments, has_limits=has_limits)
            assert (ours != theirs).sum() <= 1, "but for two tokens of the same noise to the last bit"
        rows = torch.stack([on_gpu[2], on_gpu[3], torch.ones_like(on_gpu[2])])
        rows[:, -1] = 0
        token_ids = torch.full((len(case.params), 5001), -1, dtype=torch.int32, device="cuda")
        drawn = draw_decodes(on_gpu[0], on_gpu[1], rows, token_ids)
        assert torch.equal(drawn, draw_tokens(on_gpu[0], on_gpu[1], rows[0], rows[1], has_limits=True))
        written = torch.full_like(token_ids, -1).index_put_((rows[0, :-1], rows[1, :-1]), drawn[:-1].int())
        assert torch.equal(token_ids, written), "padding writes nothing"


def test_noise_by_the_hardwares_logarithm_is_close_to_the_exact_one_in_both_tails() -> None:
    words = words_of_all_sizes()
    torch.testing.assert_close(noise_of(words.cuda()).cpu().double(), exact_noise(words), atol=1e-5, rtol=0)
    assert chi_square_of_draws(1_000_000, "cuda") < 24.3


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_of_logits_that_are_neighbours(dtype: torch.dtype) -> None:
    case = top_k_case(dtype)
    case.check_limits(token_limits(case.logits.cuda(), case.params.cuda(), case.slots.cuda()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_are_those_of_a_search_of_the_whole_row(dtype: torch.dtype) -> None:
    for case in limit_cases(dtype):
        arguments = case.logits.cuda(), case.params.cuda(), case.slots.cuda()
        candidates, figures = limit_candidates(*arguments)
        for logits, found, bound in zip(arguments[0], candidates, figures[:, 1].amax(1), strict=True):
            assert torch.equal(logits[logits > bound].sort().values, found[found > bound].sort().values)
        case.check_limits(search_thresholds(*arguments, candidates, figures))
        figures[:, 1] = torch.inf
        case.check_limits(search_thresholds(*arguments, candidates, figures))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_chosen_of_nan_is_a_token_of_the_vocabulary(dtype: torch.dtype) -> None:
    """NaN logits of one request must not become an index out of bounds, which is a sticky CUDA error."""
    for case in sampling_cases(dtype, "cuda"):
        logits = torch.full_like(case.logits, torch.nan)
        for has_limits in (False, True):
            token_ids = draw_tokens(logits, case.params, case.slots, case.positions, has_limits=has_limits)
            assert 0 <= token_ids.min() <= token_ids.max() < logits.shape[1]
