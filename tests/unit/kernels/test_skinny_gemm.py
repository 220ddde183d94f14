"""Tiling of skinny products, and which products fuse the norm of their rows."""

import pytest
import torch

from proa_engine.kernels.fp8 import FP8, Fp8Form
from proa_engine.kernels.products.fp8_linear import Fp8BlockLinear, Fp8Linear
from proa_engine.kernels.products.skinny_gemm import (
    MAX_INPUTS,
    MAX_INPUTS_OF_TWO_ROWS,
    PLAIN,
    THREAD_BYTES,
    WARPS_PER_MULTIPROCESSOR,
    SkinnyGemm,
    choose_tiling,
    skinny_gemm_form,
)

H200 = torch.device("meta")  # of as many multiprocessors
QWEN3_06B = [(4096, 1024, 1), (1024, 2048, 1), (3072, 1024, 2), (1024, 3072, 1), (151936, 1024, 1)]
LLAMA_8B = [(6144, 4096, 1), (4096, 4096, 1), (14336, 4096, 2), (4096, 14336, 1), (128256, 4096, 1)]


@pytest.mark.parametrize(("outputs", "inputs", "parts"), QWEN3_06B + LLAMA_8B)
def test_real_weights_keep_nine_tenths_of_the_programs_busy_to_the_end(outputs: int, inputs: int, parts: int) -> None:
    tiling = choose_tiling(outputs, inputs, parts, 2, H200)
    num_blocks = -(-outputs // tiling.block_n)
    num_rounds = -(-num_blocks // tiling.num_programs)
    assert num_blocks >= 0.9 * num_rounds * tiling.num_programs
    assert tiling.num_programs * tiling.num_warps <= 132 * WARPS_PER_MULTIPROCESSOR, "all fit on the device at once"
    assert tiling.num_programs >= 0.9 * 132


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("inputs", [8, 123, 896, 1024, 3072, 5120, 14336, MAX_INPUTS])
@pytest.mark.parametrize("outputs", [1, 7, 100, 5000])
def test_a_round_is_a_threads_share_at_most_unless_one_output_is_more(
    outputs: int, inputs: int, item_bytes: int
) -> None:
    tiling = choose_tiling(outputs, inputs, 1, item_bytes, H200)
    assert tiling.block_k >= inputs
    assert 1 <= tiling.num_programs <= -(-outputs // tiling.block_n)
    bytes_a_thread = tiling.block_n * tiling.block_k * item_bytes / (32 * tiling.num_warps)
    assert bytes_a_thread <= THREAD_BYTES or tiling.block_n == 1


def test_only_weights_on_a_gpu_with_rows_that_fit_have_skinny_products() -> None:
    for inputs, most in ((MAX_INPUTS_OF_TWO_ROWS, 2), (MAX_INPUTS_OF_TWO_ROWS + 8, 1), (MAX_INPUTS, 1)):
        form = skinny_gemm_form(torch.empty(8, inputs, device="meta"))
        assert [rows for rows in range(5) if form.for_rows(rows) is form] == list(range(1, most + 1))
    assert skinny_gemm_form(torch.empty(8, MAX_INPUTS + 1, device="meta")) is PLAIN
    assert skinny_gemm_form(torch.empty(8, 8)) is PLAIN


@pytest.mark.parametrize(("kind", "form"), [(Fp8Linear, Fp8Form()), (Fp8BlockLinear, Fp8Form(group=128))])
def test_products_of_8_bits_take_skinny_rows_unnormed_and_more_rows_quantized(
    kind: type[Fp8Linear | Fp8BlockLinear], form: Fp8Form
) -> None:
    for inputs, most in ((MAX_INPUTS_OF_TWO_ROWS, 2), (MAX_INPUTS_OF_TWO_ROWS + 128, 1), (MAX_INPUTS + 128, 0)):
        scales = torch.empty((2, inputs // 128) if form.group else (256,), device="meta")
        product = kind(torch.empty(256, inputs, dtype=FP8, device="meta"), scales, None, form)
        forms = [product.input_form.for_rows(rows) for rows in range(1, 5)]
        assert [isinstance(each, SkinnyGemm) for each in forms] == [rows <= most for rows in range(1, 5)]
        assert all(each is form for each in forms[most:])
    on_cpu = kind(torch.zeros(256, 128).to(FP8), torch.ones((2, 1) if form.group else (256,)), None, form)
    assert on_cpu.input_form is form
