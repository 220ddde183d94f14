"""Products of few rows on a GPU: against their reference, and in a chain of dependent launches."""

import pytest
import torch

from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows, quantize
from proa_engine.kernels.products.few_rows import few_rows_linear_reference
from proa_engine.kernels.products.fp8_linear import Fp8Linear
from proa_engine.kernels.products.gpu_linear import GpuLinear
from support.few_rows_products import few_rows_product, few_rows_products
from support.launch_chain import check_captured_chain_of_few_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TOLERANCE = {torch.bfloat16: 0.005, torch.float16: 0.002}
DTYPES = list(TOLERANCE)


def near(ours: torch.Tensor, theirs: torch.Tensor, share: float) -> None:
    ours, theirs = ours.float(), theirs.float()
    assert ours.isfinite().all()
    error = (ours - theirs).abs().mean() / theirs.abs().mean()
    assert error < share, f"relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_odd_sizes_in_every_tiling(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for product in few_rows_products(dtype, "cuda"):
        expected = product.expected()
        for tiling in product.tilings():
            # The tensor cores' quick sums of 8 bits keep 14 bits.
            near(product.compute(tiling), expected, 0.01 if product.scales is not None else TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fp8", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("num_rows", [3, 16, 17, 33, 64, 65, 128, 129, 256])
def test_products_of_real_sizes(num_rows: int, is_fp8: bool, dtype: torch.dtype) -> None:
    """The class's choice, whichever it is, three times."""
    form = Fp8Form() if is_fp8 else None
    for outputs, inputs in ((6144, 4096), (4096, 14336), (28672, 4096), (1024, 2048)):
        case = few_rows_product(
            num_rows, outputs, inputs, dtype, form, gated=False, has_bias=outputs == 6144, device="cuda"
        )
        linear: GpuLinear | Fp8Linear = GpuLinear(case.weight, case.bias)
        if form is not None:
            assert case.scales is not None
            linear = Fp8Linear(case.weight, case.scales, case.bias, form)
        x = case.x if isinstance(case.x, QuantizedRows) else case.x.contiguous()
        for gated in (False, True):
            expected = few_rows_linear_reference(x, case.weight, case.scales, case.bias, gated=gated)
            for _ in range(3):
                ours = linear.gated(x) if gated else linear(x)
                assert isinstance(ours, torch.Tensor)
                near(ours, expected, 0.01)
        assert linear.few_rows is not None
        assert not linear.few_rows.arrived.any()


def test_rows_for_a_product_of_8_bits_are_quantized_by_the_activation_or_by_that_product() -> None:
    form = Fp8Form()
    case = few_rows_product(64, 28672, 4096, torch.bfloat16, form, gated=True, has_bias=False, device="cuda")
    assert case.scales is not None
    linear = Fp8Linear(case.weight, case.scales, None, form)
    assert isinstance(linear.gated(case.x, form), torch.Tensor)
    case = few_rows_product(300, 28672, 4096, torch.bfloat16, form, gated=True, has_bias=False, device="cuda")
    many = linear.gated(case.x, form)
    assert isinstance(many, QuantizedRows)
    expected = quantize(linear.gated(case.x), form)
    near(many.values.float() * many.scales, expected.values.float() * expected.scales, 0.01)


@pytest.mark.parametrize("is_fp8", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("num_rows", [3, 32, 64])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 3072), (4096, 14336)])
def test_a_captured_chain_equals_its_kernels_launched_one_by_one(
    hidden: int, inner: int, num_rows: int, is_fp8: bool
) -> None:
    check_captured_chain_of_few_rows(hidden, inner, num_rows, is_fp8=is_fp8, num_layers=6, num_replays=100)
