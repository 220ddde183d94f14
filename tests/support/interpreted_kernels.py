"""Run as a program with TRITON_INTERPRET=1: every Triton kernel against its reference, on odd shapes, on the CPU.

The launchers refuse nothing but layouts, so they take CPU tensors; the interpreter gets bfloat16 wrong and float16
right. Prints one line a check; ends with an error at the first that fails.
"""

import itertools

import torch

from proa_engine.kernels import paged_attention, reshape_and_cache, rms_norm, rotary, silu_and_mul
from support.kernel_cases import attention_case

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def check_norms(dtype: torch.dtype) -> None:
    for rows, size in ((1, 16), (5, 123), (3, 64)):
        x, residual = torch.randn(2, rows, size).to(dtype)
        weight = torch.randn(size).to(dtype)
        close(rms_norm._rms_norm_triton(x, weight, 1e-6), rms_norm.rms_norm_reference(x, weight, 1e-6))
        expected = rms_norm.add_rms_norm_reference(x.clone(), residual.clone(), weight, 1e-6)
        for ours, theirs in zip(
            rms_norm._add_rms_norm_triton(x.clone(), residual.clone(), weight, 1e-6), expected, strict=True
        ):
            close(ours, theirs)
    heads = torch.randn(4, 9, 12).to(dtype)[:, 2:7]  # a slice of merged projections, normalised by head
    weight = torch.randn(12).to(dtype)
    close(rms_norm._rms_norm_triton(heads, weight, 1e-6), rms_norm.rms_norm_reference(heads, weight, 1e-6))


def check_silu_and_mul(dtype: torch.dtype) -> None:
    for rows, size in ((1, 7), (3, 1100)):
        x = torch.randn(rows, 2 * size).to(dtype)
        close(silu_and_mul._silu_and_mul_triton(x), silu_and_mul.silu_and_mul_reference(x))


def check_rotary(dtype: torch.dtype) -> None:
    for tokens, heads, dim in ((1, 1, 2), (5, 3, 20), (2, 8, 16)):
        x = torch.randn(tokens, heads + 2, dim).to(dtype)[:, :heads]
        cos, sin = torch.randn(2, tokens, dim // 2)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        close(rotary._rotary_triton(x, cos, sin), rotary.rotary_reference(x, cos, sin))


def check_reshape_and_cache(dtype: torch.dtype) -> None:
    heads, block_size, dim = 3, 4, 12
    projected = torch.randn(5, 2 * heads, dim).to(dtype)
    key, value = projected[:, :heads], projected[:, heads:]
    slots = torch.tensor([9, -1, 23, 0, 7])
    caches = torch.zeros(2, 2, 6, heads, block_size, dim, dtype=dtype)
    reshape_and_cache._reshape_and_cache_triton(key, value, caches[0, 0], caches[0, 1], slots)
    reshape_and_cache.reshape_and_cache(key, value, caches[1, 0], caches[1, 1], slots)
    assert torch.equal(caches[0], caches[1])


def check_paged_attention(dtype: torch.dtype) -> None:
    decodes = [(1, 1), (1, 16), (1, 37)]
    mixed = [(1, 33), (1, 5), (3, 3), (7, 40), (20, 50)]
    shapes = [
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 20, "block_size": 4},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    ]
    for lens, shape, window in itertools.product((decodes, mixed), shapes, (None, 18)):
        case = attention_case(lens, window=window, dtype=dtype, **shape)
        metadata = case.metadata
        out = paged_attention._paged_attention_triton(
            case.query,
            case.key_cache,
            case.value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.max_query_len,
            0.25,
            window,
        )
        close(out.float(), case.expected, TOLERANCE[dtype])


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def main() -> None:
    torch.manual_seed(0)
    for dtype in TOLERANCE:
        for check in (check_norms, check_silu_and_mul, check_rotary, check_reshape_and_cache, check_paged_attention):
            check(dtype)
            print(check.__name__, dtype, "ok", flush=True)


if __name__ == "__main__":
    main()
