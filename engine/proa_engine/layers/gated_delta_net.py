"""The gated delta net (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next: projections, a short convolution, the
gated delta rule, a norm by head times a gate, output projection.

Key heads and value heads are sharded over ranks; a key head is on several ranks if there are fewer key heads than
ranks. What it keeps of the tokens before are the states of its value heads and the last inputs of the convolution.
"""

from dataclasses import dataclass, replace

import torch

from proa_engine.kernels.products.skinny_gemm import PLAIN, Activation
from proa_engine.kernels.rms_norm import gated_rms_norm
from proa_engine.kernels.states.delta_rule import gated_delta_rule
from proa_engine.kernels.states.short_conv import short_conv
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import LayerCache, StateLayer
from proa_engine.layers.linear import (
    MergedColumnParallelLinear,
    RowParallelLinear,
    Unquantized,
    column_projections,
)
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.shares import HeadShares, Share, share_heads
from proa_engine.layers.short_conv import take_conv
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

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        shares = share_heads(self.num_value_heads, self.num_key_heads, 0, num_ranks, "value heads")
        largest = replace(self, num_value_heads=shares.heads.length, num_key_heads=shares.shared.length)
        return largest.num_parameters(hidden_size) - self.num_parameters(hidden_size) // num_ranks

    def make(self, weights: Weights, context: LayerContext) -> "GatedDeltaNet":
        return GatedDeltaNet(weights / "linear_attn", context, self)

    def shares(self, parallel: ParallelContext) -> HeadShares:
        """This rank's value heads, and the key heads that they use."""
        return parallel.heads(self.num_value_heads, self.num_key_heads, "value heads")

    def projections(self, weights: Weights, context: LayerContext) -> tuple[list[Projection], list[Projection]]:
        """This rank's rows of q, k, v and the output's gate z; and of the state's gates b and a."""
        hidden_size, shares = context.hidden_size, self.shares(context.parallel)
        if self.by_key_head:
            keys = (self.key_dim, self.key_dim)
            return (
                self._parts_by_key_head(weights / "in_proj_qkvz", keys, self.value_dim, context),
                self._parts_by_key_head(weights / "in_proj_ba", (), 1, context),
            )
        key, value = shares.shared.times(self.key_dim), shares.heads.times(self.value_dim)
        qkv = column_projections(weights, ("q", "k", "v"), hidden_size, (key, key, value), "in_proj_qkv")
        z = column_projections(weights, ("in_proj_z",), hidden_size, (value,))
        heads = (shares.heads, shares.heads)
        return qkv + z, column_projections(weights, ("in_proj_b", "in_proj_a"), hidden_size, heads)

    def _parts_by_key_head(
        self, weights: Weights, of_key: tuple[int, ...], of_value: int, context: LayerContext
    ) -> list[Projection]:
        """Return the projections of a matrix that has, for each key head, rows of widths `of_key`, then twice
        `of_value` rows for each of its value heads: the first part of all of this rank's heads, then the second, and so
        on."""
        shares, group = self.shares(context.parallel), self.num_value_heads // self.num_key_heads
        # A rank has all value heads of each of its key heads, or some value heads of one key head.
        first, length = shares.heads.start % group, shares.heads.length // shares.shared.length
        of_values = Share(group, first, length).times(of_value)
        parts = [*(Share(width, 0, width) for width in of_key), of_values, of_values]
        width = sum(part.total for part in parts)
        starts = [sum(part.total for part in parts[:number]) + part.start for number, part in enumerate(parts)]
        key_heads = range(shares.shared.start, shares.shared.start + shares.shared.length)
        total = self.num_key_heads * width
        return [
            Projection(weights, total, context.hidden_size, Slice(0, head * width + start, part.length))
            for start, part in zip(starts, parts, strict=True)
            for head in key_heads
        ]


class GatedDeltaNet:
    def __init__(self, weights: Weights, context: LayerContext, options: GatedDeltaNetOptions) -> None:
        shares = options.shares(context.parallel)
        self.num_heads = shares.heads.length
        self.key_dim, self.value_dim = options.key_dim, options.value_dim
        inputs, gates = options.projections(weights, context)
        # Quantized checkpoints do not quantize the few rows of the gates, or with scales of their own.
        merged = isinstance(weights.method, Unquantized)
        self.inputs = MergedColumnParallelLinear([*inputs, *gates] if merged else inputs)
        self.gates = None if merged else MergedColumnParallelLinear(gates)
        self.input_form = self.inputs.input_form if merged else PLAIN
        key, value = shares.shared.times(options.key_dim), shares.heads.times(options.value_dim)
        self.conv = take_conv(weights / "conv1d", (key, key, value), KERNEL_SIZE)
        heads = shares.heads.along(0)
        self.a_log = weights.take("A_log", (options.num_value_heads,), heads, torch.float32)
        self.dt_bias = weights.take("dt_bias", (options.num_value_heads,), heads, torch.float32)
        self.norm_weight = (weights / "norm").take("weight", (options.value_dim,))
        self.norm_eps = options.norm_eps
        inputs_of_output = shares.heads.times(options.value_dim)
        self.output = RowParallelLinear(weights / "out_proj", inputs_of_output, context.hidden_size, context.parallel)

    @property
    def cache_layer(self) -> StateLayer:
        channels, dtype = self.conv.num_channels, self.conv.weight.dtype
        return StateLayer(
            (
                ((self.num_heads, self.value_dim, self.key_dim), torch.float32),
                ((channels, KERNEL_SIZE - 1), dtype),
            ),
            inputs=((channels, dtype), (2 * self.num_heads, dtype)),
        )

    def __call__(self, x: Activation, cache: LayerCache, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; reads and writes the states of the step's rows in `cache`."""
        metadata, states = step.metadata, step.metadata.states
        assert states is not None
        channels, width = self.conv.num_channels, self.num_heads * self.value_dim
        inputs = self.inputs(x)
        gates = inputs[:, channels + width :] if self.gates is None else self.gates(x)
        state_cache, conv_cache = cache.tensors
        plan = step.state_plan(self.conv.num_before)
        qkv, pending = short_conv(
            inputs[:, :channels],
            gates,
            self.conv,
            conv_cache,
            cache.kept,
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
            metadata.query_start_loc,
            states,
            pending=pending,
            num_decodes=metadata.num_decodes,
            batch_invariant=step.batch_invariant,
            plan=plan,
        )
        return self.output(gated_rms_norm(out, inputs[:, channels : channels + width], self.norm_weight, self.norm_eps))
