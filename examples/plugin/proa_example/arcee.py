"""Arcee (AFM-4.5B): Llama whose feed-forward layer is not gated, down(relu(up(x))²)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from proa_engine.kernels.products.skinny_gemm import Activation
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, column_projections
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import Weights
from proa_engine.models import fields as read
from proa_engine.models.config import DecoderOptions
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.families.llama import equal_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredReluOptions:
    inner_size: int
    bias: bool = False

    @property
    def routed_experts(self) -> None:
        return None

    def num_parameters(self, hidden_size: int) -> int:
        return 2 * hidden_size * self.inner_size

    def num_multiplied(self, hidden_size: int) -> int:
        return self.num_parameters(hidden_size)

    def make(self, weights: Weights, context: LayerContext) -> "SquaredRelu":
        return SquaredRelu(weights / "mlp", context, self)


class SquaredRelu:
    """Each rank has a share of the inner width."""

    def __init__(self, weights: Weights, context: LayerContext, options: SquaredReluOptions) -> None:
        hidden_size, parallel = context.hidden_size, context.parallel
        inner = parallel.width(options.inner_size, weights.method.width_unit, f"inner width of {weights.prefix}")
        projections = column_projections(weights, ("up_proj",), hidden_size, (inner,))
        self.up = MergedColumnParallelLinear(projections, bias=options.bias)
        self.down = RowParallelLinear(weights / "down_proj", inner, hidden_size, parallel, bias=options.bias)
        self.input_form = self.up.input_form

    def __call__(self, x: Activation) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]"""
        return self.down(self.up(x).relu_().square_())


class ArceeForCausalLM(DecoderForCausalLM):
    defaults: ClassVar[read.Fields] = {"rms_norm_eps": 1e-5}

    @staticmethod
    def read_options(fields: read.Fields) -> DecoderOptions:
        read.require(fields, "hidden_act", ("relu2",))
        mlp = SquaredReluOptions(inner_size=fields["intermediate_size"], bias=fields.get("mlp_bias", False))
        return equal_layers(fields, mlp=mlp)
