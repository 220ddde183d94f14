"""Experts stored as one tensor, with biases and a clamped activation, equal those of transformers."""

from typing import Any

import pytest
import torch

from proa_engine.kernels.clamped_swiglu import ClampedSwiGLU
from proa_engine.kernels.moe_route import Routing
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.moe import Router, SparseMoE, load_stacked_experts
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Experts, LinearMethod, Weights
from support.stored_weights import StoredWeights

HIDDEN, INNER, EXPERTS, CHOSEN = 64, 96, 6, 3
ACTIVATION = ClampedSwiGLU(alpha=1.702, limit=7.0)


def gpt_oss_mlp() -> torch.nn.Module:
    """Of transformers; hidden values reach the limits."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    mlp = GptOssMLP(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return mlp


def load(tensors: dict[str, torch.Tensor], rank: int, world_size: int, method: LinearMethod) -> Experts:
    return load_stacked_experts(
        Weights(StoredWeights(tensors), method) / "experts",
        HIDDEN,
        INNER,
        EXPERTS,
        ParallelContext(rank, world_size),
        ACTIVATION,
        interleaved=True,
        inputs_first=True,
        bias=True,
    )


@torch.inference_mode()
def test_gpt_oss_experts_and_router_equal_those_of_transformers() -> None:
    mlp = gpt_oss_mlp()
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected, _ = mlp(x[None])
    tensors = dict(mlp.state_dict())
    weights = Weights(StoredWeights(tensors), Unquantized())
    router = Router(weights / "router", HIDDEN, EXPERTS, Routing(CHOSEN, normalize=True), bias=True)
    moe = SparseMoE(router, load(tensors, 0, 1, Unquantized()), ParallelContext())
    torch.testing.assert_close(moe(x), expected[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_biases_count_once_when_ranks_are_summed() -> None:
    tensors = dict(gpt_oss_mlp().state_dict())
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights, experts = torch.rand(9, CHOSEN), torch.rand(9, EXPERTS).topk(CHOSEN).indices.int()
    whole = load(tensors, 0, 1, Unquantized())(x, weights, experts)
    parts = [load(tensors, rank, 2, Unquantized())(x, weights, experts) for rank in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inputs_first", [False, True])
def test_every_layout_gives_the_same_experts(interleaved: bool, inputs_first: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    x, weights = torch.randn(9, HIDDEN, generator=generator), torch.ones(9, 1)
    experts = torch.arange(9).remainder(EXPERTS).int()[:, None]

    def outputs(gate_up: torch.Tensor, down: torch.Tensor, **layout: Any) -> list[torch.Tensor]:
        tensors = {"gate_up_proj": gate_up, "down_proj": down}
        source = Weights(StoredWeights(tensors), Unquantized())
        return [
            load_stacked_experts(source, HIDDEN, INNER, EXPERTS, ParallelContext(rank, 2), **layout)(
                x, weights, experts
            )
            for rank in range(2)
        ]

    plain = outputs(gate_up, down)
    if interleaved:
        gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
    if inputs_first:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    for ours, theirs in zip(
        outputs(gate_up, down, interleaved=interleaved, inputs_first=inputs_first), plain, strict=True
    ):
        assert torch.equal(ours, theirs)
