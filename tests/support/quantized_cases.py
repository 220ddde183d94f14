"""Inputs of the 8-bit, 4-bit and expert kernels, for the tests in Triton's interpreter and on a GPU."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from proa_engine.kernels.experts.moe_pairs import ExpertBlocks
from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.kernels.fp8 import (
    FP8,
    Fp8Form,
    QuantizedRows,
    dequantize_blocks,
    dequantize_rows,
    quantize_reference,
)
from proa_engine.kernels.int8 import Int8Form, quantize_int8_reference
from proa_engine.kernels.int_weights import IntWeight
from proa_engine.kernels.products.skinny_gemm import unnormed_rows

FORMS = {
    "rows": Fp8Form(),
    "groups": Fp8Form(group=128),
    "static": Fp8Form(scale=torch.tensor([0.011])),
}
INT8_FORMS = {
    "rows": Int8Form(),
    "static": Int8Form(scale=torch.tensor([0.011])),
    "asymmetric rows": Int8Form(symmetric=False),
    "asymmetric static": Int8Form(
        symmetric=False, scale=torch.tensor([0.011]), zero=torch.tensor([-31], dtype=torch.int32)
    ),
}
ROUTINGS = (  # of so many experts
    (8, Routing(1, normalize=False)),
    (12, Routing(3, normalize=True)),
    (64, Routing(8, normalize=True)),
    (12, Routing(3, normalize=True, scale=2.5)),
    (24, Routing(4, normalize=False, num_groups=6, num_chosen_groups=3, group_best=1, scale=16.0)),
    (12, Routing(3, normalize=True, scoring="sigmoid", scale=1.8)),
    (36, Routing(5, normalize=True, scoring="sigmoid", num_groups=3, num_chosen_groups=2)),
    (32, Routing(4, normalize=False, scoring="sigmoid", num_groups=8, num_chosen_groups=4)),
)
Quantized = tuple[torch.Tensor, torch.Tensor]


def assert_same_rows(ours: QuantizedRows, theirs: QuantizedRows, share: float = 0.01) -> None:
    """`share` of the values may be a neighbour of 8 bits: what was quantized differed in its last bit, as the scales
    then may."""
    rtol = max(2e-3, torch.finfo(theirs.dtype).eps) if share else 1e-6
    torch.testing.assert_close(ours.scales.cpu(), theirs.scales.cpu(), rtol=rtol, atol=0)
    ours_dense, theirs_dense = dequantize_rows(ours).cpu(), dequantize_rows(theirs).cpu()
    differ = ours.values.float().cpu() != theirs.values.float().cpu()
    assert differ.float().mean() <= share, differ.float().mean()
    torch.testing.assert_close(ours_dense, theirs_dense, rtol=0.14, atol=float(theirs.scales.max()) * 2**-9)


def assert_same_blocks(ours: ExpertBlocks, theirs: ExpertBlocks) -> None:
    """The blocks in use are equal; what lies behind them has no meaning."""
    assert (ours.max_blocks, ours.block_size) == (theirs.max_blocks, theirs.block_size)
    assert ours.num_blocks.tolist() == theirs.num_blocks.tolist()
    used = int(theirs.num_blocks)
    assert torch.equal(ours.experts[:used].cpu(), theirs.experts[:used])
    in_use = slice(used * theirs.block_size)
    assert torch.equal(ours.pairs[in_use].cpu(), theirs.pairs[in_use])


def matrix_in_blocks(outputs: int, inputs: int) -> Quantized:
    """A weight [outputs, inputs] of 8-bit floats and its block scales, all different."""
    values = torch.randn(outputs, inputs).to(FP8)
    return values, torch.rand(-(-outputs // 128), inputs // 128) * 0.1 + 0.01


@dataclass(frozen=True, slots=True)
class SkinnyFp8Case:
    """Operands of skinny products of 8-bit floats, with all that may come before and after one."""

    x: torch.Tensor
    residual: torch.Tensor
    norm_weight: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    form: Fp8Form
    gated: bool

    def products(self, num_rows: int, multiply: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Of the first rows, as they are, after a norm, after one of their residual sum; and that sum."""
        x, residual = self.x[:num_rows], self.residual[:num_rows]
        alone = unnormed_rows(x, None, self.norm_weight, 1e-6)
        added = unnormed_rows(x, residual, self.norm_weight, 1e-6)
        products = [
            multiply(rows, self.weight, self.scales, self.bias, self.form, gated=self.gated)
            for rows in (x, alone, added)
        ]
        return [*products, added.total]

    def dense(self) -> torch.Tensor:
        """The weight as float32 numbers."""
        if self.form.group is not None:
            return dequantize_blocks(self.weight, self.scales)
        return self.weight.float() * self.scales[:, None]


def skinny_fp8_cases(
    shapes: Iterable[tuple[int, int]], num_rows: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[SkinnyFp8Case]:
    """`shapes`: outputs and inputs. In each form whose groups divide the inputs."""
    ends = itertools.cycle(((False, False), (True, True), (False, True), (True, False)))
    for (outputs, inputs), form in itertools.product(shapes, FORMS.values()):
        if form.group is not None and inputs % form.group:
            continue
        gated, has_bias = next(ends)
        size = 2 * outputs if gated else outputs
        dense, bias = torch.randn(size, inputs) / inputs**0.5, torch.randn(size)
        if form.group is not None:
            scales = torch.rand(-(-size // 128), inputs // 128) * 0.002 + 0.001
            spread = scales.repeat_interleave(128, 0)[:size].repeat_interleave(128, 1)
            weight = (dense / spread).clamp(-448, 448).to(FP8)
        else:
            rows = quantize_reference(dense, Fp8Form())
            weight, scales = rows.values, rows.scales.flatten()
        x, residual = torch.randn(2, num_rows, inputs)
        yield SkinnyFp8Case(
            x.to(device, dtype),
            residual.to(device, dtype),
            torch.randn(inputs).to(device, dtype),
            weight.to(device),
            scales.to(device),
            bias.to(device, dtype) if has_bias else None,
            Fp8Form(form.group, None if form.scale is None else form.scale.to(device)),
            gated,
        )


def int_case(
    *shape: int, bits: int = 4, group_size: int = 128, shuffled: bool = False, dtype: torch.dtype
) -> IntWeight:
    """`shape`: outputs and inputs, or experts before them."""
    *lead, inputs = shape
    num_groups = inputs // group_size
    return IntWeight(
        numbers=torch.randint(0, 1 << bits, shape, dtype=torch.uint8),
        scales=((torch.rand(*lead, num_groups) * 0.2 + 0.05) / (1 << bits)).to(dtype),
        zeros=torch.randint(0, (1 << bits) + 1, (*lead, num_groups)).to(dtype),
        bits=bits,
        groups=(torch.randperm(inputs) // group_size).to(torch.int32) if shuffled else None,
    )


@dataclass(frozen=True)
class ExpertCase:
    x: torch.Tensor  # [tokens, hidden]
    weights: torch.Tensor  # [tokens, k]
    experts: torch.Tensor  # [tokens, k]
    gate_up: torch.Tensor  # [experts, 2 * inner, hidden]
    down: torch.Tensor  # [experts, hidden, inner]


def expert_case(tokens: int, *, hidden: int, inner: int, experts: int, k: int, dtype: torch.dtype) -> ExpertCase:
    """Random experts and routing; one expert gets no token."""
    chosen = routing(tokens, k, experts - 1)
    return ExpertCase(
        x=torch.randn(tokens, hidden).to(dtype),
        weights=torch.rand(tokens, k),
        experts=chosen,
        gate_up=(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5).to(dtype),
        down=(torch.randn(experts, hidden, inner) * inner**-0.5).to(dtype),
    )


def routing(tokens: int, k: int, experts: int) -> torch.Tensor:
    """k different experts of each token [tokens, k] int32, uniform."""
    return torch.rand(tokens, experts).topk(k).indices.to(torch.int32)


def in_integers(matrices: torch.Tensor) -> Quantized:
    """Matrices [..., outputs, inputs] as 8-bit integers, and a scale for each output."""
    rows = quantize_int8_reference(matrices.flatten(0, -2), Int8Form())
    return rows.values.view(matrices.shape), rows.scales.view(matrices.shape[:-1])


def in_channels(matrices: torch.Tensor) -> Quantized:
    """Matrices [..., outputs, inputs] as 8-bit floats, and a scale for each output."""
    rows = quantize_reference(matrices.flatten(0, -2), Fp8Form())
    return rows.values.view(matrices.shape), rows.scales.view(matrices.shape[:-1])


def in_blocks(matrices: torch.Tensor) -> Quantized:
    """As `in_channels`, with scales of blocks of 128 by 128, all different."""
    num, outputs, inputs = matrices.shape
    scales = torch.rand(num, outputs // 128, inputs // 128) * 0.002 + 0.001
    spread = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return (matrices.float() / spread).clamp(-448, 448).to(FP8), scales
