"""Dense products of 4-bit floats against their references in Triton's interpreter."""

from unittest import mock

import torch

from proa_engine.kernels.fp4 import StoredFp4, pack_fp4
from proa_engine.kernels.products.fp4_linear import choose_tiling, fp4_matmul
from proa_engine.kernels.products.product_tile import new_counters
from proa_engine.kernels.tilings import TILINGS, tilings_of
from support.fp4_cases import KINDS, every_scale, fp4_case
from support.interpreter import close

CPU = torch.device("cpu")


def product(x: torch.Tensor, stored: StoredFp4, bias: torch.Tensor | None = None) -> torch.Tensor:
    arrived = new_counters(CPU)
    y = fp4_matmul(x, pack_fp4(stored.stacked(), None if bias is None else bias[None]), arrived)
    assert not arrived.any()
    return y


def check_every_weight_is_exact(dtype: torch.dtype) -> None:
    """Of each number of 4 bits with each scale, those that are zero, negative or subnormal among them."""
    for stored in (every_scale(), fp4_case("mxfp4", 70, 160)):
        num_inputs = 2 * stored.codes.shape[1]
        weights = product(torch.eye(num_inputs, dtype=dtype), stored).t()
        assert torch.equal(weights, stored.dequantize().to(dtype))


def check_dense_products(dtype: torch.dtype) -> None:
    """Odd sizes; inputs that end within a block; and tiles that one program or several compute."""
    sizes = {"nvfp4": ((1, 24, 16), (3, 200, 208), (17, 72, 656), (65, 130, 1040), (130, 65, 1552))}
    sizes["mxfp4"] = ((1, 24, 32), (3, 200, 224), (17, 72, 672), (65, 130, 1056), (130, 65, 1568))
    assert choose_tiling(17, 72, 656, 132, tilings_of(CPU)).num_parts == 2
    assert choose_tiling(3, 200, 208, 132, tilings_of(CPU)).num_parts == 1
    for kind in KINDS:
        for rows, outputs, inputs in sizes[kind]:
            stored, bias = fp4_case(kind, outputs, inputs), torch.randn(outputs).to(dtype) if rows != 17 else None
            compare(rows, stored, bias, dtype)


def check_products_with_the_tiles_of_a_b200(dtype: torch.dtype) -> None:
    with mock.patch("proa_engine.kernels.products.fp4_linear.tilings_of", return_value=TILINGS[100]):
        for rows, outputs in ((17, 72), (130, 65)):
            compare(rows, fp4_case("nvfp4", outputs, 272), None, dtype)


def compare(rows: int, stored: StoredFp4, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
    num_inputs = 2 * stored.codes.shape[1]
    x = torch.randn(rows, num_inputs + 16).to(dtype)[:, :num_inputs]
    expected = x.double() @ stored.dequantize().double().t()
    expected += 0 if bias is None else bias.double()
    scale = expected.abs().max()
    close((product(x, stored, bias) / scale).to(dtype), (expected / scale).to(dtype))
