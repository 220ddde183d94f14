"""Modules of `transformers` are replaced by Proa's where these compute the same, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from proa_engine.models.transformers_adapter.own_modules import OwnExperts, OwnGatedLayers, OwnList, OwnNorm
from proa_engine.models.transformers_adapter.replacements import replace_modules
from proa_engine.models.transformers_adapter.rotation import rotate_together

SIZE = 32


def apply_rotary_pos_emb(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    cos, sin = cos[:, None], sin[:, None]
    return query * cos + turn(query) * sin, key * cos + turn(key) * sin


class Rotated(nn.Module):
    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(query, key, cos, sin)


class Norm(nn.Module):
    def __init__(self, formula: Callable[[Tensor, Tensor, float], Tensor], eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))
        self.formula = formula
        self.variance_epsilon = eps
        self.momentum = 0.01  # another number that could be eps

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x.float(), self.weight.float(), self.variance_epsilon).to(x.dtype)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class Gated(nn.Module):
    def __init__(self, act_fn: Callable[[Tensor], Tensor], scale: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(SIZE, 48, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(48, SIZE)
        self.act_fn = act_fn
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.scale)
        return result


class Experts(nn.Module):
    def __init__(self, act_fn: Callable[[Tensor], Tensor], scale: float = 1.0) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(6, 2 * 24, SIZE))
        self.down_proj = nn.Parameter(torch.randn(6, SIZE, 24))
        self.act_fn = act_fn
        self.scale = scale

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,tkih->tki", hidden_states, self.gate_up_proj[top_k_index]).chunk(2, dim=-1)
        each = torch.einsum("tki,tkhi->tkh", self.act_fn(gate) * up, self.down_proj[top_k_index])
        return (each * top_k_weights[..., None] * self.scale).sum(1).to(hidden_states.dtype)


@torch.inference_mode()
def replaced(module: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    owner: Any = nn.Sequential(module).to(dtype)
    replace_modules(owner, {each for each in owner.modules() if isinstance(each, nn.Linear)})
    return owner[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_norms_of_one_vector_are_replaced(offset: int, dtype: torch.dtype) -> None:
    module = Norm(lambda x, weight, eps: rms(x, weight + offset, eps))
    own = replaced(module, dtype)
    assert isinstance(own, OwnNorm)
    assert own.eps == module.variance_epsilon
    x = torch.randn(5, SIZE).to(dtype)
    torch.testing.assert_close(own(x), module(x))


@pytest.mark.parametrize(
    "formula",
    [
        lambda x, weight, eps: F.layer_norm(x, (SIZE,), weight, None, eps),
        lambda x, weight, eps: rms(x, weight, eps) * 1.05,
        lambda x, weight, eps: rms(x, weight, 2 * eps),
        lambda x, weight, eps: (rms(x, weight, eps), x),
    ],
    ids=["mean", "scale", "eps", "two results"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_norms_are_left(formula: Callable[..., Any], dtype: torch.dtype) -> None:
    module = Norm(formula)
    assert replaced(module, dtype) is module


@pytest.mark.parametrize("kind", [Gated, Experts])
@pytest.mark.parametrize(
    ("act_fn", "scale", "is_replaced"),
    [
        (F.silu, 1.0, True),
        (nn.GELU("tanh"), 1.0, True),
        (F.gelu, 1.0, False),
        (F.relu, 1.0, False),
        (F.silu, 1.1, False),
    ],
    ids=["silu", "gelu by tanh", "gelu", "relu", "scaled"],
)
def test_gated_layers_and_experts_are_replaced_by_activation(
    kind: type[Gated | Experts], act_fn: Callable[[Tensor], Tensor], scale: float, is_replaced: bool
) -> None:
    module = kind(act_fn, scale)
    own = replaced(module)
    if not is_replaced:
        assert own is module
        return
    assert isinstance(own, OwnGatedLayers | OwnExperts)
    x = torch.randn(7, SIZE)
    inputs: tuple[Tensor, ...] = (x[None],)
    if kind is Experts:
        inputs = x, torch.stack([torch.randperm(6)[:3] for _ in x]), torch.rand(7, 3)
    with torch.inference_mode():
        torch.testing.assert_close(own(*inputs), module(*inputs), rtol=1e-4, atol=1e-4)


def test_all_layers_of_a_list_are_the_list_itself() -> None:
    layers = replaced(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    assert isinstance(layers, OwnList)
    assert layers[:3] is layers
    assert list(layers[:2]) == [layers[0], layers[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_queries_and_keys_are_rotated_together_with_the_same_bits(dtype: torch.dtype) -> None:
    module, other = Rotated(), Rotated()
    shapes = (1, 4, 9, 16), (1, 2, 9, 16), (1, 9, 16), (1, 9, 16)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    expected = module(*inputs)
    rotate_together(nn.Sequential(module), dtype)
    assert "forward" in vars(module)
    assert "forward" not in vars(other)
    assert all(torch.equal(*pair) for pair in zip(module(*inputs), expected, strict=True))
    floats = (*inputs[:2], inputs[2].float(), inputs[3].float())  # is left to the library's function
    assert all(torch.equal(*pair) for pair in zip(module(*floats), other(*floats), strict=True))


@torch.inference_mode()
def test_another_rotation_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return query * cos[:, None] + query.roll(1, -1) * sin[:, None], key

    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", interleaved)
    module = Rotated()
    rotate_together(nn.Sequential(module), torch.float32)
    assert "forward" not in vars(module)
