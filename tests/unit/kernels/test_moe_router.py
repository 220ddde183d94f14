"""Which steps take one launch for a router's norm, product and choice of experts."""

import pytest
import torch

from proa_engine.kernels.experts import moe_router
from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.kernels.experts.moe_router import MAX_ROWS, ROWS, GpuRouter, Router, choose_tiling, make_router
from proa_engine.kernels.launch import HOPPER_MULTIPROCESSORS, cdiv
from proa_engine.kernels.products.product_tile import new_counters
from proa_engine.kernels.products.skinny_gemm import PLAIN, SkinnyGemm
from proa_engine.kernels.tilings import TILINGS


def router(experts: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> GpuRouter:
    weight = torch.empty(experts, inputs, dtype=dtype, device="meta")
    made = make_router(weight, None, Routing(4, normalize=True), None)
    assert isinstance(made, GpuRouter)
    return made


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_router, "tilings_of", lambda device: TILINGS[90])


@pytest.mark.parametrize(
    ("experts", "inputs", "most"),
    [
        (128, 2048, 128),  # Qwen3-30B-A3B
        (32, 2880, 256),  # gpt-oss-20b
        (128, 2880, 64),  # gpt-oss-120b
        (256, 2048, 64),  # Qwen3.5-35B-A3B
        (512, 2048, 32),  # Qwen3-Next
        (8, 4096, 256),  # Mixtral
    ],
)
@pytest.mark.usefixtures("_hopper")
def test_a_router_computes_the_norm_of_steps_whose_programs_take_half_of_the_gpu(
    experts: int, inputs: int, most: int
) -> None:
    made = router(experts, inputs)
    for num_rows in (1, 2, 3, most):
        assert isinstance(made.input_form.for_rows(num_rows), SkinnyGemm)
    assert made.input_form.for_rows(most + 1) is PLAIN
    tiling = choose_tiling(inputs, TILINGS[90].router)
    assert 2 * cdiv(experts, tiling.experts) * cdiv(most, ROWS) <= HOPPER_MULTIPROCESSORS
    assert cdiv(MAX_ROWS, ROWS) <= new_counters(torch.device("meta")).numel()


@pytest.mark.usefixtures("_hopper")
def test_other_routers_have_a_launch_for_each() -> None:
    for made in (router(256, 7168), router(128, 2056), router(128, 2048, torch.float32), router(640, 2048)):
        assert made.input_form.for_rows(2) is not PLAIN
        assert made.input_form.for_rows(3) is PLAIN


def test_gpus_with_less_shared_memory_and_cpus_have_a_launch_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in (80, 89, 120):
        monkeypatch.setattr(moe_router, "tilings_of", lambda device, key=capability: TILINGS.get(key, TILINGS[89]))
        assert router(128, 2048).input_form.for_rows(3) is PLAIN
    made = make_router(torch.zeros(8, 64), None, Routing(2, normalize=True), None)
    assert isinstance(made, Router)
    assert made.input_form.for_rows(1) is PLAIN
