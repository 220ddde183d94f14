"""Mixtures of experts: pairs in the order of experts, and all forms of weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from proa_engine.kernels.experts.moe import (
    ExpertActivation,
    ExpertMatrices,
    FusedExperts,
    LoopedExperts,
    StackedMatrices,
    rows_per_block,
)
from proa_engine.kernels.experts.moe_fp4 import Fp4Experts
from proa_engine.kernels.experts.moe_int import pack_experts
from proa_engine.kernels.experts.moe_pairs import (
    ExpertRange,
    align_pairs,
    align_pairs_reference,
    combine_pairs,
    combine_pairs_reference,
    is_held,
)
from proa_engine.kernels.fp4 import StoredFp4, pack_fp4
from proa_engine.kernels.fp8 import Fp8Form
from proa_engine.kernels.int8 import Int8Form
from proa_engine.kernels.int_weights import IntWeight, dequantize_int
from proa_engine.kernels.products.fp4_linear import Fp4Linear
from proa_engine.kernels.products.fp8_linear import Fp8BlockLinear, Fp8Linear
from proa_engine.kernels.products.int8_linear import Int8Linear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.relu_squared import ReluSquared
from proa_engine.kernels.silu_and_mul import ClampedSwiGLU, GatedActivation, silu_and_mul
from support.fp4_cases import KINDS, fp4_case
from support.kernels.case import WITHOUT_DTYPE, KernelCase, close, grid, holds, near, on_device, table
from support.kernels.quantized import in_proportion
from support.quantized_cases import (
    assert_same_blocks,
    expert_case,
    in_blocks,
    in_channels,
    in_integers,
    int_case,
    routing,
)

CLAMPED = ClampedSwiGLU(alpha=1.702, limit=1.5)
ACTIVATIONS: dict[str, ExpertActivation] = {
    "silu": silu_and_mul,
    "gelu": GatedActivation("gelu_tanh"),
    "clamped": CLAMPED,
    "clamped at 7": ClampedSwiGLU(alpha=1.702, limit=7.0),
    "relu squared": ReluSquared(),
}


@dataclass(frozen=True)
class Weights:
    """One matrix of every expert, in one form, for the kernels and for the reference."""

    values: torch.Tensor | StoredFp4 | IntWeight
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    form: Fp8Form | Int8Form | None = None

    def matrices(self) -> StackedMatrices:
        if isinstance(self.values, StoredFp4):
            return Fp4Experts(pack_fp4(self.values, self.bias))
        if isinstance(self.values, IntWeight):
            return pack_experts(self.values)
        return ExpertMatrices(self.values, self.scales, self.bias)

    def products(self) -> list[Callable[..., torch.Tensor]]:
        if isinstance(self.values, IntWeight):
            return [Linear(weight) for weight in dequantize_int(self.values)]
        number = len(self.values.codes if isinstance(self.values, StoredFp4) else self.values)
        biases = [None] * number if self.bias is None else self.bias
        if isinstance(self.values, StoredFp4):
            return [Fp4Linear(*each) for each in zip(self.values.unbind(), biases, strict=True)]
        if self.form is None:
            return [Linear(*each) for each in zip(self.values, biases, strict=True)]
        assert self.scales is not None
        kind: Any = Int8Linear if isinstance(self.form, Int8Form) else Fp8Linear
        if isinstance(self.form, Fp8Form) and self.form.group is not None:
            kind = Fp8BlockLinear
        return [kind(*each, None, self.form) for each in zip(self.values, self.scales, strict=True)]


def weights_in(form: str, matrices: torch.Tensor, has_bias: bool = False, static: float = 0.02) -> Weights:
    """Matrices [experts, outputs, inputs] in a form: "float"; "rows", "static" or "groups" of 8-bit floats; "int8" and
    "int8 static"; or others of the same shape, "mxfp4", "nvfp4", or "4 bits in 128" and the like. `static`: a scale."""
    dtype, scale = matrices.dtype, torch.tensor([static])
    bias = torch.randn(matrices.shape[:2]).to(dtype) if has_bias else None
    if form == "float":
        return Weights(matrices, bias=bias)
    if form in KINDS:
        return Weights(fp4_case(form, *matrices.shape), bias=bias)
    if form.startswith("int8"):
        return Weights(*in_integers(matrices), form=Int8Form(scale=scale if form == "int8 static" else None))
    if form == "groups":
        return Weights(*in_blocks(matrices), form=Fp8Form(group=128))
    if form in ("rows", "static"):
        return Weights(*in_channels(matrices), form=Fp8Form(scale=scale if form == "static" else None))
    bits, _, _, group_size = form.split()
    return Weights(int_case(*matrices.shape, bits=int(bits), group_size=int(group_size), dtype=dtype))


def layer(
    form: str,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    *,
    down_form: str | None = None,
    has_bias: bool = False,
    activation: str = "silu",
    held: tuple[int, int] | None = None,
) -> tuple[Any, ...]:
    """`held`: the first and the number of the rank's experts; None: it has all."""
    case = expert_case(tokens, hidden=hidden, inner=inner, experts=experts, k=k, dtype=dtype)
    own = ExpertRange.all(experts) if held is None else ExpertRange(*held, experts)
    gate_up, down = (each[own.first :][: own.size] for each in (case.gate_up, case.down))
    first = weights_in(form, gate_up, has_bias, static=0.03)
    second = weights_in(down_form or form, down, has_bias, static=0.006)
    return case.x, case.weights, case.experts, first, second, ACTIVATIONS[activation], own


def fused(
    x: Any, weights: Any, experts: Any, first: Weights, second: Weights, activation: Any, held: Any
) -> torch.Tensor:
    matrices = first.matrices(), second.matrices()
    return FusedExperts(*matrices, first.form, activation, held, second.form)(x, weights, experts)


def looped(
    x: Any, weights: Any, experts: Any, first: Weights, second: Weights, activation: Any, held: Any
) -> torch.Tensor:
    return LoopedExperts(first.products(), second.products(), activation, held)(x, weights, experts)


def close_but_on_gpus(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if ours.is_cuda:
        near(ours, theirs)
    else:
        close(ours, theirs, 5)


def near_in_8_bits(ours: torch.Tensor, theirs: torch.Tensor, on_cpu: float, on_gpu: float) -> None:
    """Where gate and up differ in their last bit, some of 8 bits differ too: 2 % of one token's mean on a GPU."""
    near(ours, theirs, on_gpu if ours.is_cuda else max(on_cpu, 0.004 if ours.dtype == torch.float16 else 0.0))


layers = partial(KernelCase, make=layer, operation=fused, reference=looped)
TOKENS_OF_GPUS = (1, 2, 16, 64, 300, 3000)  # 16: the most pairs that are not sorted
ON_GPUS = grid([{"hidden": 512, "inner": 256, "experts": 32, "k": 4}], tokens=TOKENS_OF_GPUS)
EXPERTS_OF_FLOATS = layers(
    compare=close_but_on_gpus,
    interpreted=table(
        "form tokens hidden inner experts k has_bias activation",
        *(("float", tokens, 96, 40, 6, 2, False, "silu") for tokens in (1, 7, 100)),
        *(("float", tokens, 96, 40, 6, 2, True, "clamped") for tokens in (1, 100)),
    ),
    gpu=grid(ON_GPUS, form=["float"], held=(None, (0, 11), (22, 10), (31, 1))),
)
EXPERTS_OF_8_BIT_FLOATS = layers(
    compare=partial(near_in_8_bits, on_cpu=0.005, on_gpu=0.03),
    interpreted=grid([{"tokens": 40, "hidden": 256, "inner": 128, "experts": 6, "k": 2}], form=("rows", "groups")),
    gpu=grid(ON_GPUS, form=("rows", "groups")),
)
EXPERTS_OF_8_BIT_INTEGERS = layers(
    compare=partial(near_in_8_bits, on_cpu=0.002, on_gpu=0.02),
    interpreted=grid(  # few pairs and sorted ones; static scales differ between the two products
        [{"hidden": 136, "inner": 40, "experts": 4, "k": 2}], tokens=(3, 33), form=("int8", "int8 static")
    ),
    gpu=grid(ON_GPUS, form=("int8", "int8 static")),
    dtypes=(torch.float32, torch.bfloat16),
)
EXPERTS_OF_4_BIT_FLOATS = layers(
    compare=partial(in_proportion, times=5),
    interpreted=grid(
        table(
            "tokens hidden inner experts k has_bias",
            *((1, 96, 32, 6, 2, True), (9, 128, 160, 6, 2, False), (100, 192, 64, 6, 2, True)),
        ),
        form=KINDS,
    ),
    gpu=grid(
        [{"hidden": 480, "inner": 352, "experts": 32, "k": 4, "has_bias": True, "activation": "clamped at 7"}],
        tokens=TOKENS_OF_GPUS,
        form=KINDS,
    ),
)
EXPERTS_OF_INTEGERS = layers(
    compare=partial(in_proportion, times=5),
    interpreted=grid(
        table(
            "form tokens hidden inner experts k",
            ("4 bits in 32", 1, 96, 32, 4, 2),
            ("8 bits in 64", 1, 64, 64, 4, 2),
            ("4 bits in 64", 33, 128, 64, 4, 2),
        ),
        held=(None, (1, 2)),
    ),
    gpu=grid(
        [{"hidden": 512, "inner": 384, "experts": 32, "k": 4}],
        tokens=TOKENS_OF_GPUS,
        form=("4 bits in 128", "8 bits in 128"),
        held=(None, (22, 10)),
    ),
)


@holds(interpreted=[{"tokens": 1}, {"tokens": 100}])
def ranges_of_experts(dtype: torch.dtype, device: str, tokens: int) -> None:
    """Unequal ranges of experts add up to all of them, whatever memory holds of the pairs of others."""
    x, weights, chosen, first, second, activation, whole = layer(
        "float", tokens, 96, 40, 7, 3, dtype, has_bias=True, activation="clamped"
    )
    total = torch.zeros(tokens, 96)
    for held in (ExpertRange(0, 3, 7), ExpertRange(3, 3, 7), ExpertRange(6, 1, 7)):
        own = slice(held.first, held.first + held.size)
        parts = (Weights(each.values[own], bias=each.bias[own]) for each in (first, second))
        arguments = x, weights, chosen, *parts, activation, held
        ours = fused(*arguments)
        close(ours, looped(*arguments), 5)
        total += ours.float()
    close(total.to(dtype), looped(x, weights, chosen, first, second, activation, whole), 15)


def chosen_experts(
    tokens: int, k: int, experts: int, num_chosen: int, held: tuple[int, int], block_size: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """`num_chosen` experts get tokens, the first ones."""
    return routing(tokens, k, num_chosen), ExpertRange(*held, experts), block_size


ALIGN_PAIRS = KernelCase(
    make=chosen_experts,
    operation=align_pairs,
    reference=align_pairs_reference,
    compare=assert_same_blocks,
    interpreted=table(
        "tokens k experts num_chosen held block_size",
        (1, 2, 8, 8, (0, 8), 16),
        (3, 1, 1, 1, (0, 1), 16),
        (130, 3, 5, 5, (0, 5), 16),
        (300, 4, 24, 24, (0, 24), 32),
        (1025, 1, 4, 4, (0, 4), 64),
        (2500, 8, 9, 9, (0, 9), 128),  # more than one chunk a segment
        (1, 2, 8, 8, (3, 1), 16),
        (130, 3, 5, 5, (0, 2), 16),
        (300, 4, 24, 24, (16, 8), 32),
        (2500, 8, 9, 9, (4, 5), 128),
    ),
    gpu=[
        {"tokens": tokens, "k": 8, "experts": experts, "num_chosen": experts - 1, "held": held}
        | {"block_size": rows_per_block(8 * tokens, experts)}
        for experts in (9, 128)
        for tokens in (1, 3, 130, 256, 8192)
        for held in ((0, experts), (experts // 3, experts // 2))
    ],
    dtypes=WITHOUT_DTYPE,
)


@holds(interpreted=[{}], gpu=[{}])
def combined_pairs(dtype: torch.dtype, device: str) -> None:
    """Rows of pairs whose expert another rank holds are never written, and not read."""
    pairs, experts = torch.randn(5, 3, 1100).to(dtype), routing(5, 3, 7)
    everything, held = ExpertRange.all(7), ExpertRange(2, 3, 7)
    close(combine_pairs(*on_device((pairs, experts, everything), device)), pairs.double().sum(1).to(dtype))
    is_own = is_held(experts, held)[..., None]
    expected = pairs.double().masked_fill(~is_own, 0).sum(1).to(dtype)
    pairs = pairs.masked_fill(~is_own, torch.nan)
    close(combine_pairs(*on_device((pairs, experts, held), device)), expected)
    close(combine_pairs_reference(pairs, experts, held), expected)
