"""The gated delta net (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next: projections, a short convolution, the
gated delta rule, a norm by head times a gate, output projection.

Key heads and value heads are sharded over ranks. What it keeps of the tokens before are the states of its value heads
and the last inputs of the convolution.
"""

from dataclasses import dataclass

import torch

from proa_engine.kernels.delta_rule import gated_delta_rule
from proa_engine.kernels.rms_norm import gated_rms_norm
from proa_engine.kernels.short_conv import short_conv
from proa_engine.kernels.skinny_gemm import Activation
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import LayerCache, StateLayer
from proa_engine.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    Unquantized,
    column_projections,
)
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.weights import Projection, Slice, Weights

KERNEL_SIZE = 4  # of the convolution, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetOptions:
    """Sizes before sharding. Value heads share key heads in groups, as query heads share KV heads in attention."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    norm_eps: float
    by_key_head: bool  # the checkpoint merges projections by key head (Qwen3-Next); else it merges q, k and v

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        key_width = self.num_key_heads * self.key_dim
        return key_width, key_width, self.num_value_heads * self.value_dim

    @property
    def cache_kind(self) -> type[StateLayer]:
        return StateLayer

    def num_parameters(self, hidden_size: int) -> int:
        return hidden_size * (sum(self.widths) + 2 * self.widths[2] + 2 * self.num_value_heads)

    def make(self, weights: Weights, context: LayerContext) -> "GatedDeltaNet":
        return GatedDeltaNet(weights / "linear_attn", context, self)

    def projections(self, weights: Weights, context: LayerContext) -> tuple[list[Projection], list[Projection]]:
        """This rank's rows of q, k, v and the output's gate z; and of the state's gates b and a."""
        hidden_size, parallel = context.hidden_size, context.parallel
        if self.by_key_head:
            group = self.num_value_heads // self.num_key_heads
            inputs = (self.key_dim, self.key_dim, group * self.value_dim, group * self.value_dim)
            return (
                _parts_by_key_head(weights / "in_proj_qkvz", inputs, self.num_key_heads, hidden_size, parallel),
                _parts_by_key_head(weights / "in_proj_ba", (group, group), self.num_key_heads, hidden_size, parallel),
            )
        qkv = column_projections(weights, ("q", "k", "v"), hidden_size, self.widths, parallel, "in_proj_qkv")
        z = column_projections(weights, ("in_proj_z",), hidden_size, self.widths[2:], parallel)
        heads = (self.num_value_heads, self.num_value_heads)
        return qkv + z, column_projections(weights, ("in_proj_b", "in_proj_a"), hidden_size, heads, parallel)


def _parts_by_key_head(
    weights: Weights, parts: tuple[int, ...], num_heads: int, hidden_size: int, parallel: ParallelContext
) -> list[Projection]:
    """Return the projections of a matrix that has rows of widths `parts` for each key head: the first part of all of
    this rank's heads, then the second, and so on."""
    width, share = sum(parts), parallel.share(num_heads, "number of key heads")
    heads = range(parallel.rank * share, (parallel.rank + 1) * share)
    return [
        Projection(weights, num_heads * width, hidden_size, Slice(0, head * width + sum(parts[:number]), part))
        for number, part in enumerate(parts)
        for head in heads
    ]


class GatedDeltaNet:
    def __init__(self, weights: Weights, context: LayerContext, options: GatedDeltaNetOptions) -> None:
        parallel = context.parallel
        parallel.share(options.num_key_heads, "number of key heads")
        self.num_heads = parallel.share(options.num_value_heads, "number of value heads")
        self.key_dim, self.value_dim = options.key_dim, options.value_dim
        inputs, gates = options.projections(weights, context)
        # Quantized checkpoints do not quantize the few rows of the gates, or with scales of their own.
        merged = isinstance(weights.method, Unquantized)
        self.inputs = MergedColumnParallelLinear([*inputs, *gates] if merged else inputs)
        self.gates = None if merged else MergedColumnParallelLinear(gates)
        self.input_form = self.inputs.input_form if merged else None
        self.conv_weight = _take_conv_weight(weights / "conv1d", options, parallel)
        heads = Slice(0, parallel.rank * self.num_heads, self.num_heads)
        self.a_log = weights.take("A_log", (options.num_value_heads,), heads, torch.float32)
        self.dt_bias = weights.take("dt_bias", (options.num_value_heads,), heads, torch.float32)
        self.norm_weight = (weights / "norm").take("weight", (options.value_dim,))
        self.norm_eps = options.norm_eps
        self.output = RowParallelLinear(weights / "out_proj", options.widths[2], context.hidden_size, parallel)

    @property
    def cache_layer(self) -> StateLayer:
        channels = self.conv_weight.shape[0]
        return StateLayer(
            (
                ((self.num_heads, self.value_dim, self.key_dim), torch.float32),
                ((channels, KERNEL_SIZE - 1), self.conv_weight.dtype),
            )
        )

    def __call__(self, x: Activation, cache: LayerCache, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; reads and writes the states of the step's rows in `cache`."""
        metadata, states = step.metadata, step.metadata.states
        assert states is not None
        channels, width = self.conv_weight.shape[0], self.num_heads * self.value_dim
        inputs = self.inputs(x)
        gates = inputs[:, channels + width :] if self.gates is None else self.gates(x)
        state_cache, conv_cache = cache.tensors
        plan = step.state_plan()
        qkv = short_conv(
            inputs[:, :channels],
            self.conv_weight,
            conv_cache,
            metadata.query_start_loc,
            states,
            num_decodes=metadata.num_decodes,
            plan=plan,
        )
        out = gated_delta_rule(
            qkv,
            gates,
            self.a_log,
            self.dt_bias,
            state_cache,
            states,
            num_decodes=metadata.num_decodes,
            batch_invariant=step.batch_invariant,
            plan=plan,
        )
        return self.output(gated_rms_norm(out, inputs[:, channels : channels + width], self.norm_weight, self.norm_eps))


def _take_conv_weight(weights: Weights, options: GatedDeltaNetOptions, parallel: ParallelContext) -> torch.Tensor:
    """This rank's channels of q, k and v, [channels, KERNEL_SIZE]."""
    shape = (sum(options.widths), 1, KERNEL_SIZE)
    parts, start = [], 0
    for width in options.widths:
        size = parallel.share(width, "channels of the convolution")
        parts.append(weights.take("weight", shape, Slice(0, start + parallel.rank * size, size)))
        start += width
    return torch.cat(parts).view(-1, KERNEL_SIZE)
