"""Integer weights on a GPU: products and experts against their references on the CPU."""

from dataclasses import replace

import pytest
import torch

from proa_engine.kernels.experts.moe import FusedExperts, LoopedExperts
from proa_engine.kernels.experts.moe_int import pack_experts
from proa_engine.kernels.experts.moe_pairs import ExpertRange
from proa_engine.kernels.int_weights import dequantize_int
from proa_engine.kernels.products.int_linear import IntLinear
from proa_engine.kernels.products.linear import Linear
from support.quantized_cases import expert_case, int_case, int_weight_on

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    assert ours.isfinite().all()
    error, size = (ours - theirs).abs().mean(), theirs.abs().mean()
    assert error <= 0.01 * size, f"mean error {error} of {size}"  # both 0: another rank holds the tokens' experts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group_size", "shuffled"), [(32, False), (128, False), (128, True), (2048, False)])
@pytest.mark.parametrize("rows", [1, 5, 33, 200])
def test_products(rows: int, group_size: int, shuffled: bool, bits: int, dtype: torch.dtype) -> None:
    weight = int_case(1032, 2048, bits=bits, group_size=group_size, shuffled=shuffled, dtype=dtype)
    x = torch.randn(rows, 2048).to(dtype)
    near(IntLinear(int_weight_on(weight, "cuda"), None)(x.cuda()), IntLinear(weight, None)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 33, 200])
def test_products_by_numbers_with_fractional_zeros(rows: int, bits: int, dtype: torch.dtype) -> None:
    """Scales and zeros in float32, as of GGUF's blocks."""
    weight = int_case(1032, 2048, bits=bits, group_size=32, dtype=torch.float32)
    weight = replace(weight, zeros=weight.zeros + torch.rand(weight.zeros.shape))
    x = torch.randn(rows, 2048).to(dtype)
    near(IntLinear(int_weight_on(weight, "cuda"), None)(x.cuda()), Linear(dequantize_int(weight).to(dtype))(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 300, 3000])  # 16: the most pairs that are not sorted
def test_experts(tokens: int, bits: int, dtype: torch.dtype) -> None:
    case = expert_case(tokens, hidden=512, inner=384, experts=32, k=4, dtype=dtype)
    arguments = case.x, case.weights, case.experts
    for held in (ExpertRange.all(32), ExpertRange(22, 10, 32)):
        matrices = (
            int_case(held.size, 768, 512, bits=bits, dtype=dtype),
            int_case(held.size, 512, 384, bits=bits, dtype=dtype),
        )
        gate_up, down = (pack_experts(int_weight_on(each, "cuda")) for each in matrices)
        first, second = ([Linear(weight) for weight in dequantize_int(each)] for each in matrices)
        ours = FusedExperts(gate_up, down, held=held)(*(each.cuda() for each in arguments))
        near(ours, LoopedExperts(first, second, held=held)(*arguments))
