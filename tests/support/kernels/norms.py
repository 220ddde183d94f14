"""Norms, activations and gates, and rows that are quantized alone and after these."""

from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F

from proa_engine.kernels.fp8 import FP8, Fp8Form, QuantizedRows, quantize, quantize_reference
from proa_engine.kernels.gated_group_norm import gated_group_norm, gated_group_norm_reference
from proa_engine.kernels.products.gpu_linear import GpuLinear
from proa_engine.kernels.relu_squared import relu_squared
from proa_engine.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_fp8,
    rms_norm_reference,
)
from proa_engine.kernels.sigmoid_gate import add_gated, scale_by_sigmoid
from proa_engine.kernels.silu_and_mul import (
    ActivationName,
    ClampedSwiGLU,
    activate_and_mul,
    activate_and_mul_fp8,
    activate_and_mul_reference,
    clamped_swiglu_reference,
)
from support.kernels.case import FLOATS, WITHOUT_DTYPE, KernelCase, close, grid, holds, on_device, table
from support.quantized_cases import FORMS, assert_same_rows

EPS = 1e-6
INTERPRETED = table("rows size", (1, 16), (5, 123), (3, 64))
GPU = table("rows size", (1, 16), (5, 123), (300, 4096), (7, 896), (3, 8192))
QUANTIZED_ON_GPUS = grid(rows=[33], size=(384, 4096, 14336), form=FORMS)


def rows_with_residual(rows: int, size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x, residual = torch.randn(2, rows, size).to(dtype)
    return x, residual, torch.randn(size).to(dtype), EPS


def rows_alone(rows: int, size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x, _, weight, eps = rows_with_residual(rows, size, dtype)
    return x, weight, eps


def heads(dtype: torch.dtype) -> tuple[Any, ...]:
    """A slice of merged projections, which is normalised by head."""
    return torch.randn(4, 9, 12).to(dtype)[:, 2:7], torch.randn(12).to(dtype), EPS


RMS_NORM = KernelCase(
    make=rows_alone, operation=rms_norm, reference=rms_norm_reference, interpreted=INTERPRETED, gpu=GPU
)
RMS_NORM_OF_HEADS = KernelCase(make=heads, operation=rms_norm, reference=rms_norm_reference, interpreted=[{}], gpu=[{}])
ADD_RMS_NORM = KernelCase(
    make=rows_with_residual,
    operation=add_rms_norm,
    reference=add_rms_norm_reference,
    interpreted=INTERPRETED,
    gpu=GPU,
)


def gated_rows(num_weights: int, dtype: torch.dtype, *group_size: int) -> tuple[Any, ...]:
    """Rows of three heads, or groups; the gate is a view of wider rows."""
    x, gate = torch.randn(5, 3 * 20).to(dtype), torch.randn(5, 90).to(dtype)[:, 7:67]
    return x, gate, torch.randn(num_weights).to(dtype), *group_size, EPS


def normed(values: torch.Tensor) -> torch.Tensor:
    return values / (values.square().mean(-1, keepdim=True) + EPS).sqrt()


def exact_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    expected = (normed(x.double().view(5, 3, 20)) * weight.double()).flatten(1) * F.silu(gate.double())
    return (expected.to(x.dtype),) * 2


def exact_group_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *_: float
) -> tuple[torch.Tensor, torch.Tensor]:
    expected = normed((x.double() * F.silu(gate.double())).view(5, 3, 20)).flatten(1) * weight.double()
    return (expected.to(x.dtype),) * 2


GATED_RMS_NORM = KernelCase(
    make=lambda dtype: gated_rows(20, dtype),
    operation=lambda *rows: (gated_rms_norm(*rows), gated_rms_norm_reference(*rows)),
    reference=exact_rms_norm,
    interpreted=[{}],
    gpu=[{}],
)
GATED_GROUP_NORM = KernelCase(
    make=lambda dtype: gated_rows(60, dtype, 20),
    operation=lambda *rows: (gated_group_norm(*rows), gated_group_norm_reference(*rows)),
    reference=exact_group_norm,
    interpreted=[{}],
    gpu=[{}],
)


def gate_and_up(rows: int, size: int, dtype: torch.dtype, factor: float, activation: Any) -> tuple[Any, ...]:
    return torch.randn(rows, 2 * size).mul(factor).to(dtype), activation


ACTIVATE_AND_MUL = KernelCase(
    make=gate_and_up,
    operation=activate_and_mul,
    reference=activate_and_mul_reference,
    interpreted=grid(table("rows size factor", (1, 7, 2), (3, 1100, 2)), activation=get_args(ActivationName)),
    gpu=grid(table("rows size factor", (1, 7, 4), (37, 3072, 4), (4, 14336, 4)), activation=get_args(ActivationName)),
)
CLAMPED_SWIGLU = KernelCase(
    make=gate_and_up,
    operation=lambda x, activation: activation(x),
    reference=clamped_swiglu_reference,
    interpreted=table("rows size factor activation", (3, 1100, 8, ClampedSwiGLU(alpha=1.702, limit=7.0))),
    gpu=table("rows size factor activation", (3, 1100, 8, ClampedSwiGLU(alpha=1.702, limit=7.0))),
)


def every_middle(dtype: torch.dtype) -> tuple[torch.Tensor, Fp8Form]:
    """Every number of 8 bits, the middles between neighbours, and what lies beside them."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middles, middles * 1.001, middles * 0.999]).clamp(-448, 448)[None]
    return x, Fp8Form(scale=torch.ones(1))


def rows_to_quantize(rows: int, size: int, form: str, dtype: torch.dtype) -> tuple[torch.Tensor, Fp8Form]:
    x = torch.randn(rows, size).to(dtype)
    x[3] = 0
    return x, FORMS[form]


def rows_to_norm(rows: int, size: int, form: str, dtype: torch.dtype) -> tuple[Any, ...]:
    x, residual = torch.randn(2, rows, size).to(dtype)
    return x, residual, torch.randn(size).to(dtype), FORMS[form]


def gate_and_up_in_form(rows: int, size: int, form: str, dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.randn(rows, 2 * size).to(dtype), FORMS[form]


def same_but_few(ours: QuantizedRows, theirs: QuantizedRows) -> None:
    """A GPU's result before it is quantized differs in the last bit of bfloat16, which is a step of 8 bits at times."""
    assert_same_rows(ours, theirs, share=0.03 if ours.values.is_cuda else 0.01)


def same_normed_rows(ours: tuple[QuantizedRows, torch.Tensor], theirs: tuple[QuantizedRows, torch.Tensor]) -> None:
    same_but_few(ours[0], theirs[0])
    close(ours[1], theirs[1], 0.5)


def normed_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, form: Fp8Form) -> Any:
    normed, total = add_rms_norm_reference(x, residual, weight, EPS)
    return quantize_reference(normed, form), total


def activated_reference(x: torch.Tensor, form: Fp8Form) -> QuantizedRows:
    """Rounded once to x's type, as by the kernel."""
    return quantize_reference(activate_and_mul_reference(x.float(), "silu").to(x.dtype), form)


exactly = partial(assert_same_rows, share=0)
ROUNDING_TO_8_BITS = KernelCase(
    make=every_middle, operation=quantize, reference=quantize_reference, compare=exactly, interpreted=[{}], gpu=[{}]
)
QUANTIZE = KernelCase(
    make=rows_to_quantize,
    operation=quantize,
    reference=quantize_reference,
    compare=exactly,
    interpreted=grid(rows=[5], size=[384], form=FORMS),
    gpu=QUANTIZED_ON_GPUS,
)
QUANTIZED_NORM = KernelCase(
    make=rows_to_norm,
    operation=lambda x, _, weight, form: rms_norm_fp8(x, None, weight, EPS, form)[0],
    reference=lambda x, _, weight, form: quantize_reference(rms_norm_reference(x, weight, EPS), form),
    compare=same_but_few,
    interpreted=grid(rows=[4], size=[256], form=FORMS),
    gpu=QUANTIZED_ON_GPUS,
)
QUANTIZED_NORM_OF_SUMS = KernelCase(
    make=rows_to_norm,
    operation=lambda x, residual, weight, form: rms_norm_fp8(x, residual, weight, EPS, form),
    reference=normed_reference,
    compare=same_normed_rows,
    interpreted=grid(rows=[4], size=[256], form=FORMS),
    gpu=QUANTIZED_ON_GPUS,
)
QUANTIZED_ACTIVATION = KernelCase(
    make=gate_and_up_in_form,
    operation=lambda x, form: activate_and_mul_fp8(x, "silu", form),
    reference=activated_reference,
    compare=same_but_few,
    interpreted=grid(rows=[3], size=[384], form=FORMS),
    gpu=QUANTIZED_ON_GPUS,
)


@holds(gpu=[{}], dtypes=WITHOUT_DTYPE)
def relaunches_with_other_alignments_types_and_sizes(dtype: torch.dtype, device: str) -> None:
    """Each launch after a key's first bypasses Triton, so every combination is launched three times, in two orders."""
    cases = [(dtype, offset, size) for dtype in FLOATS for offset in (0, 1, 8) for size in (1, 16, 1000, 1024)]
    for dtype, offset, size in [*cases, *cases, *reversed(cases)]:
        x = torch.randn(3 * size + offset).to(dtype)[offset:].view(3, size)
        arguments = x, torch.randn(3, size).to(dtype), torch.randn(size + offset).to(dtype)[offset:], EPS
        ours, theirs = add_rms_norm(*on_device(arguments, device)), add_rms_norm_reference(*on_device(arguments, "cpu"))
        close(ours, theirs)


RELU_SQUARED = KernelCase(
    make=lambda dtype, rows, size: (torch.randn(rows, size).to(dtype),),
    operation=relu_squared,
    reference=lambda x: x.double().relu().square().to(x.dtype),
    interpreted=table("rows size", (1, 40), (7, 300)),
    gpu=table("rows size", (1, 40), (130, 1856)),
)


def exact_scaled(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (x.double() * gate.double().sigmoid()).to(x.dtype)


SCALE_BY_SIGMOID = KernelCase(
    make=lambda dtype, size: (torch.randn(5, size).to(dtype), 4 * torch.randn(5, size + 30).to(dtype)[:, 7 : 7 + size]),
    operation=scale_by_sigmoid,
    reference=exact_scaled,
    interpreted=[{"size": 60}, {"size": 1030}],
    gpu=[{"size": 60}, {"size": 4096}],
)


def gated_experts(rows: int, size: int, num_inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Routed experts' sum, shared experts' output, the layer's inputs, which are part of wider rows, and the gate."""
    inputs = torch.randn(rows, num_inputs + 16).to(dtype)[:, 16:]
    return *torch.randn(2, rows, size).to(dtype), inputs, (torch.randn(1, num_inputs) / num_inputs**0.5).to(dtype)


def with_gated(total: torch.Tensor, x: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    add_gated(total, x, inputs, GpuLinear(weight))
    return total


def exact_with_gated(total: torch.Tensor, x: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate = F.linear(inputs.double(), weight.double()).sigmoid()
    return (total.double() + x.double() * gate).to(total.dtype)


ADD_GATED = KernelCase(
    make=gated_experts,
    operation=with_gated,
    reference=exact_with_gated,
    interpreted=table("rows size num_inputs", (1, 40, 40), (5, 1030, 300)),
    gpu=table("rows size num_inputs", (1, 2048, 2048), (5, 1030, 300), (130, 2048, 2048)),
)
