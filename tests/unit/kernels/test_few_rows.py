"""Which products take the kernel for few rows, and in which tiles."""

import pytest
import torch

from proa_engine.kernels.fp8 import FP8
from proa_engine.kernels.launch import HOPPER_MULTIPROCESSORS, cdiv
from proa_engine.kernels.products import few_rows
from proa_engine.kernels.products.few_rows import MAX_ROWS, MOST_PARTS, FewRowsLinear, Tiling, few_rows_tiling
from proa_engine.kernels.products.product_tile import new_counters
from proa_engine.kernels.tilings import TILINGS

LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
QWEN3_06B = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
WEIGHTS = [*LLAMA_8B.values(), *QWEN3_06B.values(), (128256, 4096), (14336, 4096), (2048, 8192)]


def tiling_of(num_rows: int, weight: tuple[int, int], item_bytes: int) -> Tiling | None:
    tiles = TILINGS[90].few_rows
    assert tiles is not None
    return few_rows_tiling(num_rows, *weight, item_bytes, HOPPER_MULTIPROCESSORS, tiles)


def tile(num_rows: int, weight: tuple[int, int], item_bytes: int) -> tuple[int, int, int] | None:
    """Outputs, bytes of inputs and parts of a tile."""
    tiling = tiling_of(num_rows, weight, item_bytes)
    return None if tiling is None else (tiling.block_n, tiling.block_k * item_bytes, tiling.num_parts)


@pytest.mark.parametrize("item_bytes", [1, 2])
def test_tilings_are_those_that_were_the_fastest(item_bytes: int) -> None:
    for num_rows in (3, 16, 32):
        assert tile(num_rows, LLAMA_8B["qkv"], item_bytes) == (64, 512, 1)
        assert tile(num_rows, LLAMA_8B["o"], item_bytes) == (64, 512, 2)
        assert tile(num_rows, LLAMA_8B["down"], item_bytes) == (64, 512, 2)
        assert tile(num_rows, QWEN3_06B["qkv"], item_bytes) == (64, 512, 1)
        assert tile(num_rows, QWEN3_06B["gate_up"], item_bytes) == (64, 512, 1)
    assert tile(16, LLAMA_8B["gate_up"], item_bytes) == (128, 256, 1)
    assert tile(64, LLAMA_8B["gate_up"], item_bytes) == (128, 128, 1)
    assert tile(64, LLAMA_8B["down"], item_bytes) == (64, 256, 2)
    assert tile(64, QWEN3_06B["down"], item_bytes) == (64, 256, MOST_PARTS)


def test_more_rows_take_the_kernel_in_8_bits_where_all_tiles_run_at_the_same_time() -> None:
    assert tile(65, LLAMA_8B["o"], 2) is None
    assert tile(128, LLAMA_8B["o"], 1) == (64, 256, 2)
    assert tile(256, LLAMA_8B["o"], 1) == (64, 256, 1)
    assert tile(257, LLAMA_8B["o"], 1) is None
    assert tile(128, LLAMA_8B["qkv"], 1) == (64, 256, 1)
    assert tile(256, LLAMA_8B["qkv"], 1) is None
    assert tile(128, LLAMA_8B["gate_up"], 1) is None


@pytest.mark.parametrize("item_bytes", [1, 2])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_programs_that_share_tiles_run_at_the_same_time_and_have_counters(
    weight: tuple[int, int], item_bytes: int
) -> None:
    for num_rows in range(1, MAX_ROWS[item_bytes] + 1):
        tiling = tiling_of(num_rows, weight, item_bytes)
        if tiling is not None and tiling.num_parts > 1:
            tiles = cdiv(num_rows, tiling.block_m) * cdiv(weight[0], tiling.block_n)
            assert tiles * tiling.num_parts <= HOPPER_MULTIPROCESSORS
            assert tiles <= new_counters(torch.device("meta")).numel()


def test_other_products_and_those_of_other_gpus_are_cublas_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "tilings_of", lambda device: TILINGS[90])
    for num_rows, outputs, inputs in ((0, 4096, 4096), (8, 128, 4096), (8, 4096, 4104)):
        assert tile(num_rows, (outputs, inputs), 2) is None
    for dtype, takes in ((torch.bfloat16, True), (torch.float16, True), (FP8, True), (torch.float32, False)):
        weight = torch.empty(4096, 1024, dtype=dtype, device="meta")
        assert (FewRowsLinear(weight, None, None).tiling(8) is not None) == takes
    assert FewRowsLinear(torch.empty(4096, 1024, dtype=torch.float16), None, None).tiling(8) is None
    monkeypatch.setattr(few_rows, "tilings_of", lambda device: TILINGS[89])
    assert FewRowsLinear(torch.empty(4096, 1024, dtype=FP8, device="meta"), None, None).tiling(8) is None
