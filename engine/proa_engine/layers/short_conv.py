"""The gated short convolution of LFM2: output(c * conv(b * x)), with b, c and x of one projection; and the weights of
short convolutions.

Channels are sharded over ranks. What it keeps of the tokens before are the last inputs of the convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from proa_engine.kernels.products.skinny_gemm import Activation
from proa_engine.kernels.states.conv_weights import ConvWeights
from proa_engine.kernels.states.short_conv import short_conv
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import LayerCache, StateLayer
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, column_projections
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.shares import Share
from proa_engine.layers.weights import Slice, Weights

KERNEL_SIZES = (3, 4)  # tokens, of the kernels


def take_conv(
    weights: Weights, parts: Sequence[Share], kernel_size: int, *, bias: bool = False, silu: bool = True
) -> ConvWeights:
    """Take this rank's channels: `parts` lie one after the other in the checkpoint's channels."""
    num_channels, start, of_parts = sum(part.total for part in parts), 0, []
    for part in parts:
        of_parts.append(Slice(0, start + part.start, part.length))
        start += part.total
    weight = torch.cat([weights.take("weight", (num_channels, 1, kernel_size), part) for part in of_parts])
    offset = torch.cat([weights.take("bias", (num_channels,), part) for part in of_parts]) if bias else None
    return ConvWeights(weight.view(-1, kernel_size), offset, silu)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedShortConvOptions:
    channels: int
    kernel_size: int
    bias: bool  # of the projections and the convolution

    @property
    def cache_kind(self) -> type[StateLayer]:
        return StateLayer

    def num_parameters(self, hidden_size: int) -> int:
        return 4 * hidden_size * self.channels

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        return 0

    def make(self, weights: Weights, context: LayerContext) -> "GatedShortConv":
        return GatedShortConv(weights / "conv", context, self)


class GatedShortConv:
    def __init__(self, weights: Weights, context: LayerContext, options: GatedShortConvOptions) -> None:
        parallel, hidden_size, unit = context.parallel, context.hidden_size, weights.method.width_unit
        share = parallel.width(options.channels, unit, f"channels of {weights.prefix}")
        projections = column_projections(weights, ("b", "c", "x"), hidden_size, (share,) * 3, "in_proj")
        self.inputs = MergedColumnParallelLinear(projections, bias=options.bias)
        self.input_form = self.inputs.input_form
        self.conv = take_conv(weights / "conv", (share,), options.kernel_size, bias=options.bias, silu=False)
        self.output = RowParallelLinear(weights / "out_proj", share, hidden_size, parallel, bias=options.bias)

    @property
    def cache_layer(self) -> StateLayer:
        channels, dtype = self.conv.num_channels, self.conv.weight.dtype
        state = (channels, self.conv.num_before), dtype
        return StateLayer((state,), inputs=((channels, dtype), (0, dtype)))

    def __call__(self, x: Activation, cache: LayerCache, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; reads and writes the states of the step's rows in `cache`."""
        metadata = step.metadata
        assert metadata.states is not None
        gate_in, gate_out, values = self.inputs(x).chunk(3, dim=-1)
        values = gate_in * values
        (conv_cache,) = cache.tensors
        convolved, _ = short_conv(
            values,
            values[:, :0],
            self.conv,
            conv_cache,
            cache.kept,
            metadata.query_start_loc,
            metadata.states,
            num_decodes=metadata.num_decodes,
            plan=step.state_plan(self.conv.num_before),
        )
        return self.output(convolved.mul_(gate_out))
