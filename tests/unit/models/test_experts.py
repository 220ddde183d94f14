"""Experts stored as one tensor, with biases and a clamped activation, equal those of transformers."""

from typing import Any

import pytest
import torch

from proa_engine.kernels.experts.moe_route import Routing
from proa_engine.kernels.silu_and_mul import ClampedSwiGLU
from proa_engine.layers.experts import PLAIN_EXPERTS, ExpertTensors
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.mlp import GatedMLPOptions, MoEOptions, RouterOptions, SharedExpertOptions
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.quantized.quant_fp4 import Mxfp4
from proa_engine.layers.rotary import RotaryTables
from proa_engine.layers.weights import Experts, LinearMethod, Weights
from support.mxfp4_models import mxfp4_tensors
from support.stored_weights import StoredWeights

HIDDEN, INNER, EXPERTS, CHOSEN = 64, 96, 6, 3
GPT_OSS = ExpertTensors(
    activation=ClampedSwiGLU(alpha=1.702, limit=7.0), interleaved=True, inputs_first=True, bias=True
)


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


def load(
    tensors: dict[str, torch.Tensor], rank: int, world_size: int, method: LinearMethod, *, by_expert: bool = False
) -> Experts:
    weights = Weights(StoredWeights(tensors), method) / "experts"
    return GPT_OSS.load(weights, context(rank, world_size, by_expert=by_expert), EXPERTS, INNER)


def context(rank: int = 0, world_size: int = 1, *, by_expert: bool = False) -> LayerContext:
    parallel = ParallelContext(rank, world_size)
    return LayerContext(HIDDEN, parallel, RotaryTables(1, torch.device("cpu")), expert_parallel=by_expert)


@torch.inference_mode()
def test_gpt_oss_experts_and_router_equal_those_of_transformers() -> None:
    mlp = gpt_oss_mlp()
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected, _ = mlp(x[None])
    options = MoEOptions(
        num_experts=EXPERTS,
        expert_size=INNER,
        router=RouterOptions(routing=Routing(CHOSEN, normalize=True), name="router", bias=True),
        experts=GPT_OSS,
    )
    stored = StoredWeights({f"mlp.{name}": tensor for name, tensor in mlp.state_dict().items()})
    moe = options.make(Weights(stored, Unquantized()), context())
    torch.testing.assert_close(moe(x), expected[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_shared_experts_are_added_and_gated() -> None:
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    config = Qwen2MoeConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=2 * INNER,
        norm_topk_prob=False,
    )
    block = Qwen2MoeSparseMoeBlock(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    x = torch.randn(40, HIDDEN, generator=generator)
    options = MoEOptions(
        num_experts=EXPERTS,
        expert_size=INNER,
        router=RouterOptions(routing=Routing(CHOSEN, normalize=False)),
        experts=ExpertTensors(),
        shared=SharedExpertOptions(
            mlp=GatedMLPOptions(inner_size=2 * INNER), name="shared_expert", gate="shared_expert_gate"
        ),
    )
    weights = Weights(
        StoredWeights({f"mlp.{name}": tensor for name, tensor in block.state_dict().items()}), Unquantized()
    )
    torch.testing.assert_close(options.make(weights, context())(x), block(x[None])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("by_expert", "num_ranks"), [(False, 2), (True, 2), (True, 4), (True, 6)])
@torch.inference_mode()
def test_biases_count_once_when_ranks_are_summed(by_expert: bool, num_ranks: int) -> None:
    tensors = dict(gpt_oss_mlp().state_dict())
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights, experts = torch.rand(9, CHOSEN), torch.rand(9, EXPERTS).topk(CHOSEN).indices.int()
    whole = load(tensors, 0, 1, Unquantized())(x, weights, experts)
    parts = [
        load(tensors, rank, num_ranks, Unquantized(), by_expert=by_expert)(x, weights, experts)
        for rank in range(num_ranks)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("by_expert", [False, True])
def test_every_layout_gives_the_same_experts(interleaved: bool, inputs_first: bool, by_expert: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    x, weights = torch.randn(9, HIDDEN, generator=generator), torch.ones(9, 1)
    experts = torch.arange(9).remainder(EXPERTS).int()[:, None]

    def outputs(gate_up: torch.Tensor, down: torch.Tensor, **layout: Any) -> list[torch.Tensor]:
        tensors = {"gate_up_proj": gate_up, "down_proj": down}
        source = Weights(StoredWeights(tensors), Unquantized())
        return [
            ExpertTensors(**layout).load(source, each, EXPERTS, INNER)(x, weights, experts)
            for each in (context(rank, 2, by_expert=by_expert) for rank in range(2))
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


def in_4_bits(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random experts with the biases of `tensors`: what is stored, and transformers' dense twin."""
    biases = {name: tensor for name, tensor in tensors.items() if name.endswith("bias")}
    gate_up = mxfp4_tensors("experts.gate_up_proj", (EXPERTS, 2 * INNER, HIDDEN))
    down = mxfp4_tensors("experts.down_proj", (EXPERTS, HIDDEN, INNER))
    return biases | gate_up[0] | down[0], biases | gate_up[1] | down[1]


@torch.inference_mode()
def test_experts_of_mxfp4_equal_their_dequantized_twins() -> None:
    stored, dense = in_4_bits(dict(gpt_oss_mlp().state_dict()))
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1))
    weights, experts = torch.rand(9, CHOSEN), torch.rand(9, EXPERTS).topk(CHOSEN).indices.int()
    expected = load(dense, 0, 1, Unquantized())(x, weights, experts)
    assert torch.equal(load(stored, 0, 1, Mxfp4())(x, weights, experts), expected)
    parts = [load(stored, rank, 3, Mxfp4())(x, weights, experts) for rank in range(3)]
    torch.testing.assert_close(parts[0] + parts[1] + parts[2], expected, atol=1e-3, rtol=1e-4)
    parts = [load(stored, rank, 4, Mxfp4(), by_expert=True)(x, weights, experts) for rank in range(4)]
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, atol=1e-3, rtol=1e-4)


def test_what_mxfp4_cannot_store_is_refused_by_name() -> None:
    stored, _ = in_4_bits(dict(gpt_oss_mlp().state_dict()))
    with pytest.raises(ValueError, match=r"experts: 64 inputs and 48 of the inner width on each rank cannot be cut"):
        load(stored, 0, 2, Mxfp4())
    stored["experts.down_proj_scales"][0, 0, 0] = 193
    with pytest.raises(ValueError, match=r"experts: scales above 2\^65 are not supported"):
        load(stored, 0, 1, Mxfp4())


@torch.inference_mode()
def test_experts_of_other_ranks_are_left_to_them() -> None:
    taken: list[str] = []

    class Recorded(StoredWeights):
        def take(self, name: str, *arguments: Any, **options: Any) -> torch.Tensor:
            taken.append(name)
            return super().take(name, *arguments, **options)

        def leave(self, prefix: str) -> None:
            taken.append(f"left {prefix}")

    tensors = {
        f"experts.{number}.{name}.weight": torch.zeros(shape)
        for number in range(3)
        for name, shape in (
            ("gate_proj", (INNER, HIDDEN)),
            ("up_proj", (INNER, HIDDEN)),
            ("down_proj", (HIDDEN, INNER)),
        )
    }
    weights = Weights(Recorded(tensors), Unquantized()) / "experts"
    PLAIN_EXPERTS.load(weights, context(1, 2, by_expert=True), 3, INNER)
    assert sorted(taken) == [
        "experts.2.down_proj.weight",
        "experts.2.gate_proj.weight",
        "experts.2.up_proj.weight",
        "left experts.0",
        "left experts.1",
    ]
