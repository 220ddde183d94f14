"""Products of `kernels/products/few_rows.py`: inputs in odd shapes, each with all tilings, and their exact results."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from proa_engine.kernels.fp8 import Fp8Form, QuantizedRows, quantize_reference
from proa_engine.kernels.products.few_rows import Tiling, few_rows_linear, few_rows_linear_reference
from proa_engine.kernels.products.product_tile import new_counters, rows_per_program
from proa_engine.kernels.tilings import TILINGS

# Rows, outputs and inputs. Each of the last two ends within a block, and inputs have several parts.
SHAPES = ((3, 200, 336), (19, 144, 2064), (50, 528, 1040), (100, 336, 1552), (250, 80, 784))


@dataclass(frozen=True, slots=True)
class FewRowsProduct:
    x: torch.Tensor | QuantizedRows
    weight: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    gated: bool

    def tilings(self) -> Iterator[Tiling]:
        """Every tile of so many rows, whole and in parts."""
        block_m = rows_per_program(self.x.shape[0])
        assert TILINGS[90].few_rows is not None
        for tiles, num_parts in itertools.product(TILINGS[90].few_rows, (1, 3)):
            if block_m in tiles:
                yield Tiling.of(tiles[block_m], block_m, self.weight.element_size(), num_parts)

    def expected(self) -> torch.Tensor:
        return few_rows_linear_reference(self.x, self.weight, self.scales, self.bias, gated=self.gated)

    def compute(self, tiling: Tiling) -> torch.Tensor:
        arrived = new_counters(self.weight.device)
        y = few_rows_linear(self.x, self.weight, self.scales, self.bias, arrived, tiling, gated=self.gated)
        assert not arrived.any()
        return y


def few_rows_products(dtype: torch.dtype, device: torch.device | str = "cpu") -> Iterator[FewRowsProduct]:
    static = Fp8Form(scale=torch.tensor([0.011], device=device))
    for shape, form in itertools.product(SHAPES, (None, Fp8Form(), static)):
        for gated, has_bias in ((False, True), (True, False)):
            yield few_rows_product(*shape, dtype, form, gated=gated, has_bias=has_bias, device=device)


def few_rows_product(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    form: Fp8Form | None,
    *,
    gated: bool,
    has_bias: bool,
    device: torch.device | str,
) -> FewRowsProduct:
    """`form`: how the rows are quantized, if they and the weight are."""
    # Rows of x lie apart, as those of a part of a wider tensor.
    x = torch.randn(num_rows, num_inputs + 16, device=device).to(dtype)[:, :num_inputs]
    weight = torch.randn(num_outputs, num_inputs, device=device) / num_inputs**0.5
    bias = torch.randn(num_outputs, device=device).to(dtype) if has_bias else None
    if form is None:
        return FewRowsProduct(x, weight.to(dtype), None, bias, gated)
    rows, stored = quantize_reference(x.contiguous(), form), quantize_reference(weight, Fp8Form())
    return FewRowsProduct(rows, stored.values, stored.scales.flatten(), bias, gated)
