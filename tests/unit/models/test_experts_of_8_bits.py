"""Experts of 8-bit floats and integers, stored so or quantized while loading, equal sums of rounded numbers in float64;
and what stays unquantized."""

import logging
from collections.abc import Callable

import pytest
import torch

from proa_engine.kernels.silu_and_mul import silu_and_mul
from proa_engine.layers.experts import PLAIN_EXPERTS, ExpertTensors
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.quantized.quant_fp8 import OnlineFp8, StoredFp8
from proa_engine.layers.quantized.quant_int8 import StoredInt8
from proa_engine.layers.rotary import RotaryTables
from proa_engine.layers.weights import Experts, LinearMethod, Projection, Slice, Weights
from proa_engine.models.quantization.formats import Int8Format, Quantization
from proa_engine.models.quantization.methods import linear_method
from support.quantized_models import Quantizer, fp8_block, fp8_tensor_static, int8
from support.stored_weights import StoredWeights

HIDDEN, INNER, EXPERTS, CHOSEN, TOKENS = 128, 256, 6, 3, 9
MATRICES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
Round = Callable[[torch.Tensor], torch.Tensor]  # of activations, float64
Tensors = dict[str, torch.Tensor]


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale


def to_integers(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-128, 127).round() * scale


def by_token(round_to: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], largest: float) -> Round:
    return lambda x: round_to(x, x.abs().amax(-1, keepdim=True) / largest)


def static(round_to: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], scale: float) -> Round:
    return lambda x: round_to(x, torch.tensor(scale).double())


def in_groups(x: torch.Tensor) -> torch.Tensor:
    return by_token(to_fp8, 448)(x.unflatten(-1, (-1, 128))).flatten(-2)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored_by(quantize: Quantizer) -> tuple[Tensors, Tensors]:
    """Random experts: what is stored, and their dense twins."""
    stored: Tensors = {}
    dense: Tensors = {}
    for number in range(EXPERTS):
        for place, (name, shape) in enumerate(MATRICES.items()):
            module = f"experts.{number}.{name}"
            parts, dense[module] = quantize(random(*shape, seed=10 * number + place) / shape[1] ** 0.5)
            stored |= {f"{module}.{part}": value for part, value in parts.items()}
    return stored, dense


def with_input_scales(stored: Tensors, scales: tuple[float, float], num_largest: int) -> Tensors:
    """Those given, of gate and up, and of down, are the largest of `num_largest` experts; others have smaller ones."""
    largest = {"gate_proj": scales[0], "up_proj": scales[0], "down_proj": scales[1]}
    found = dict(stored)
    for number in range(EXPERTS):
        for name, scale in largest.items():
            is_largest = number < num_largest and name != "gate_proj"
            found[f"experts.{number}.{name}.input_scale"] = torch.tensor([scale if is_largest else 0.3 * scale])
    return found


def load(
    tensors: Tensors, method: LinearMethod, rank: int = 0, num_ranks: int = 1, *, by_expert: bool = False
) -> Experts:
    context = LayerContext(
        HIDDEN, ParallelContext(rank, num_ranks), RotaryTables(1, torch.device("cpu")), expert_parallel=by_expert
    )
    together = "experts.gate_up_proj" in tensors
    storage = ExpertTensors() if together else PLAIN_EXPERTS
    return storage.load(Weights(StoredWeights(tensors), method) / "experts", context, EXPERTS, INNER)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    return random(TOKENS, HIDDEN, seed=2), scores[:, :CHOSEN].contiguous(), scores.topk(CHOSEN).indices.int()


def expected(dense: Tensors, round_input: Round, round_hidden: Round) -> torch.Tensor:
    """In float64, with the hidden numbers rounded to float32 as the layer does."""
    x, weights, experts = inputs()
    total = torch.zeros(TOKENS, HIDDEN).double()
    for token, chosen in enumerate(experts.tolist()):
        for weight, number in zip(weights[token].tolist(), chosen, strict=True):
            gate, up, down = (dense[f"experts.{number}.{name}"].double() for name in MATRICES)
            row = round_input(x[token].double())
            hidden = silu_and_mul(torch.cat([gate @ row, up @ row]).float()[None])[0].double()
            total[token] += weight * (down @ round_hidden(hidden))
    return total.float()


STORED: dict[str, tuple[LinearMethod, Quantizer, Round, Round]] = {
    "fp8, static": (
        StoredFp8("tensor", static=True),
        fp8_tensor_static,
        static(to_fp8, 0.01),
        static(to_fp8, 0.003),
    ),
    "int8, by token": (
        StoredInt8("channel", static=False, symmetric=True),
        int8("channel"),
        by_token(to_integers, 127.5),
        by_token(to_integers, 127.5),
    ),
    "int8, static": (
        StoredInt8("channel", static=True, symmetric=True),
        int8("channel", input_scale=0.0),
        static(to_integers, 0.025),
        static(to_integers, 0.01),
    ),
}
INPUT_SCALES = {"fp8, static": (0.01, 0.003), "int8, static": (0.025, 0.01)}


def assert_equal_but_for_middles(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """A hidden number in the middle of two may be rounded up here and down there."""
    error = (ours - theirs).abs()
    assert error.median() < 1e-5
    assert error.mean() < 0.003 * theirs.abs().mean()


@pytest.mark.parametrize("name", STORED)
@torch.inference_mode()
def test_stored_experts_multiply_rounded_numbers(name: str) -> None:
    """Static scales are the largest of the experts' that a rank holds."""
    method, quantize, round_input, round_hidden = STORED[name]
    stored, dense = stored_by(quantize)
    same = stored
    if name in INPUT_SCALES:
        same = with_input_scales(stored, INPUT_SCALES[name], EXPERTS)
        stored = with_input_scales(stored, INPUT_SCALES[name], 1)
    ours = load(stored, method)(*inputs())
    assert_equal_but_for_middles(ours, expected(dense, round_input, round_hidden))
    exact = expected(dense, lambda x: x, lambda x: x)
    assert (ours - exact).abs().mean() > 0.002 * exact.abs().mean(), "inputs are rounded"
    halves = [load(stored, method, rank, 2)(*inputs()) for rank in range(2)]
    assert (halves[0] + halves[1] - ours).abs().mean() < 0.02 * ours.abs().mean()
    parts = [load(same, method, rank, 4, by_expert=True)(*inputs()) for rank in range(4)]
    assert (torch.stack(parts).sum(0) - ours).abs().mean() < 0.02 * ours.abs().mean()


def by_output(weight: torch.Tensor) -> torch.Tensor:
    return by_token(to_fp8, 448)(weight).float()


def by_block(weight: torch.Tensor) -> torch.Tensor:
    return fp8_block("weight_scale")(weight)[1]


ONLINE: dict[str, tuple[LinearMethod, Round, Round]] = {  # how weights and activations are rounded
    "fp8": (OnlineFp8(), by_output, by_token(to_fp8, 448)),
    "fp8_per_block": (OnlineFp8(by_block=True), by_block, in_groups),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ONLINE)
@torch.inference_mode()
def test_experts_are_quantized_while_loading(name: str, together: bool) -> None:
    method, round_weight, rounded = ONLINE[name]
    _, weights = stored_by(lambda weight: ({}, weight))
    dense = {module: round_weight(weight) for module, weight in weights.items()}
    tensors = {f"{module}.weight": weight for module, weight in weights.items()}
    if together:
        gate, up, down = (torch.stack([weights[f"experts.{n}.{name}"] for n in range(EXPERTS)]) for name in MATRICES)
        tensors = {"experts.gate_up_proj": torch.cat([gate, up], 1), "experts.down_proj": down}
    ours = load(tensors, method)(*inputs())
    assert_equal_but_for_middles(ours, expected(dense, rounded, rounded))
    exact = expected(weights, lambda x: x, lambda x: x)
    assert 0.002 < (ours - exact).abs().mean() / exact.abs().mean() < 0.1
    parts = [load(tensors, method, rank, 2, by_expert=True)(*inputs()) for rank in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], ours, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_asymmetric_experts_are_refused_by_name() -> None:
    stored, _ = stored_by(int8("channel"))
    method = linear_method(Quantization(Int8Format("channel", static=False, symmetric=False)), None)
    with pytest.raises(ValueError, match=r"experts.0.gate_proj: experts with asymmetric activations in 8-bit integers"):
        load(stored, method)


@pytest.mark.parametrize(("by_block", "inputs"), [(False, 128), (True, 80)])
def test_a_matrix_whose_size_has_no_product_stays_unquantized(
    by_block: bool, inputs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as the gates of a head or two on one of many ranks. A line names it, once for all layers."""
    caplog.set_level(logging.INFO)
    weight, x = random(16, inputs, seed=0), random(5, inputs, seed=1)
    method = OnlineFp8(by_block)
    for layer in range(2):
        name = f"layers.{layer}.in_proj_ba"
        weights = Weights(StoredWeights({f"{name}.weight": weight}), method, name)
        loaded = method.load([Projection(weights, 16, inputs, Slice(0, 8, 8))], None)
        torch.testing.assert_close(loaded.product(x), x @ weight[8:].t(), atol=1e-4, rtol=0)
    unit = 128 if by_block else 16
    line = f"in_proj_ba stays unquantized: 8 outputs and {inputs} inputs on a rank are not multiples of "
    assert [record.getMessage() for record in caplog.records] == [line + f"{1 if by_block else 16} and {unit}"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("symmetric", [True, False])
@torch.inference_mode()
def test_two_ranks_share_a_matrix_of_integers(symmetric: bool, dim: int) -> None:
    stored, dense = int8("channel", input_scale=0.03, input_zero_point=-9)(random(96, 256, seed=0))
    method = StoredInt8("channel", static=True, symmetric=symmetric)
    weights = Weights(StoredWeights({f"up.{name}": tensor for name, tensor in stored.items()}), method, "up")
    x = random(5, 256, seed=1)
    half = (96, 256)[dim] // 2
    parts = [
        method.load([Projection(weights, 96, 256, Slice(dim, start, half))], None).product(
            x if dim == 0 else x.narrow(1, start, half).contiguous()
        )
        for start in (0, half)
    ]
    zero = 0 if symmetric else -9
    rounded = ((x.double() / 0.03 + zero).clamp(-128, 127).round() - zero) * 0.03
    out = torch.cat(parts, dim=-1) if dim == 0 else parts[0] + parts[1]
    torch.testing.assert_close(out, (rounded @ dense.double().t()).float(), atol=1e-3, rtol=0)
    taken = method.take_matrix(Projection(weights, 96, 256, Slice(dim, half, half)))
    torch.testing.assert_close(taken, dense.narrow(dim, half, half))


def test_the_range_of_a_static_input_holds_those_of_all_matrices() -> None:
    """A smaller scale, and a range that reaches further down."""
    ranges = {"q": (0.02, 10), "k": (0.01, -100)}
    tensors: Tensors = {}
    for name, (scale, zero) in ranges.items():
        parts, _ = int8("channel", input_scale=scale, input_zero_point=zero)(torch.eye(64) * 127.5)
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}
    method = StoredInt8("channel", static=True, symmetric=False)
    source = Weights(StoredWeights(tensors), method)
    product = method.load([Projection(source / name, 64, 64, Slice(0, 0, 64)) for name in ranges], None).product
    least, most = (-128 - 10) * 0.02, (127 - 10) * 0.02
    x = torch.linspace(2 * least, 2 * most, 64)[None]
    step = (most - least) / 255
    y = product(x)[:, :64] / 127
    assert (y - x.clamp(least, most)).abs().max() <= 0.51 * step
