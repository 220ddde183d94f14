"""Mamba2 (Dao and Gu 2024, arXiv 2405.21060): one projection, a short convolution, the state space, a norm by group
behind the gate, output projection.

Heads and groups are sharded over ranks, as value heads and key heads of a gated delta net are; a group is on several
ranks if there are fewer groups than ranks. What it keeps of the tokens before are the states of its heads, in float32
whatever the configuration says, and the last inputs of the convolution.
"""

from dataclasses import dataclass, replace

import torch

from proa_engine.kernels.products.skinny_gemm import Activation
from proa_engine.kernels.states.short_conv import short_conv
from proa_engine.kernels.states.ssd import ssd
from proa_engine.kernels.states.ssd_recurrent import SsdWeights
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import LayerCache, StateLayer
from proa_engine.layers.linear import MergedColumnParallelLinear, RowParallelLinear, column_projections
from proa_engine.layers.norm import GatedGroupNorm, NormOptions
from proa_engine.layers.parallel import LayerContext, ParallelContext
from proa_engine.layers.shares import HeadShares, Share, share_heads
from proa_engine.layers.short_conv import take_conv
from proa_engine.layers.weights import Projection, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Options:
    """Sizes before sharding. Heads share the B and C of groups."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    conv_bias: bool
    bias: bool  # of the projections
    norm: NormOptions
    step_limit: tuple[float, float]  # least and greatest time step

    @property
    def cache_kind(self) -> type[StateLayer]:
        return StateLayer

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def num_parameters(self, hidden_size: int) -> int:
        return hidden_size * (3 * self.width + 2 * self.num_groups * self.state_size + self.num_heads)

    def num_copied(self, hidden_size: int, num_ranks: int) -> int:
        shares = share_heads(self.num_heads, self.num_groups, 0, num_ranks, "heads of Mamba2")
        largest = replace(self, num_heads=shares.heads.length, num_groups=shares.shared.length)
        return largest.num_parameters(hidden_size) - self.num_parameters(hidden_size) // num_ranks

    def make(self, weights: Weights, context: LayerContext) -> "Mamba2":
        return Mamba2(weights / "mamba", context, self)

    def shares(self, parallel: ParallelContext) -> HeadShares:
        """This rank's heads, and the groups that they use."""
        return parallel.heads(self.num_heads, self.num_groups, "heads of Mamba2")

    def convolved(self, shares: HeadShares) -> tuple[Share, Share, Share]:
        """This rank's x, B and C."""
        groups = shares.shared.times(self.state_size)
        return shares.heads.times(self.head_dim), groups, groups

    def projections(self, weights: Weights, context: LayerContext) -> list[Projection]:
        """This rank's rows of z, x, B, C and dt. Those of one rank are one slice, which formats that store blocks of
        rows need not cut."""
        shares = self.shares(context.parallel)
        parts: tuple[Share, ...] = (shares.heads.times(self.head_dim), *self.convolved(shares), shares.heads)
        names: tuple[str, ...] = ("z", "x", "b", "c", "dt")
        if context.parallel.world_size == 1:
            total = sum(part.total for part in parts)
            names, parts = ("all",), (Share(total, 0, total),)
        return column_projections(weights, names, context.hidden_size, parts, "in_proj")


class Mamba2:
    def __init__(self, weights: Weights, context: LayerContext, options: Mamba2Options) -> None:
        shares, parallel = options.shares(context.parallel), context.parallel
        self.num_heads, self.head_dim = shares.heads.length, options.head_dim
        self.state_size = options.state_size
        self.inputs = MergedColumnParallelLinear(options.projections(weights, context), bias=options.bias)
        self.input_form = self.inputs.input_form
        parts = options.convolved(shares)
        self.conv = take_conv(weights / "conv1d", parts, options.kernel_size, bias=options.conv_bias)
        a_log, dt_bias, d = (
            weights.take(name, (options.num_heads,), shares.heads.along(0), torch.float32)
            for name in ("A_log", "dt_bias", "D")
        )
        self.ssd = SsdWeights(a_log, dt_bias, d, options.step_limit)
        values = shares.heads.times(options.head_dim)
        self.norm = GatedGroupNorm(weights / "norm", values, shares.shared, options.norm, parallel)
        self.output = RowParallelLinear(weights / "out_proj", values, context.hidden_size, parallel, bias=options.bias)

    @property
    def cache_layer(self) -> StateLayer:
        channels, dtype = self.conv.num_channels, self.conv.weight.dtype
        return StateLayer(
            (
                ((self.num_heads, self.head_dim, self.state_size), torch.float32),
                ((channels, self.conv.num_before), dtype),
            ),
            inputs=((channels, dtype), (self.num_heads, dtype)),
        )

    def __call__(self, x: Activation, cache: LayerCache, step: AttentionStep) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; reads and writes the states of the step's rows in `cache`."""
        metadata, states = step.metadata, step.metadata.states
        assert states is not None
        gate, xbc, dt = self.inputs(x).split(
            (self.num_heads * self.head_dim, self.conv.num_channels, self.num_heads), dim=-1
        )
        state_cache, conv_cache = cache.tensors
        plan = step.state_plan(self.conv.num_before)
        convolved, pending = short_conv(
            xbc,
            dt,
            self.conv,
            conv_cache,
            cache.kept,
            metadata.query_start_loc,
            states,
            num_decodes=metadata.num_decodes,
            plan=plan,
        )
        out = ssd(
            convolved,
            dt,
            self.ssd,
            state_cache,
            metadata.query_start_loc,
            states,
            pending=pending,
            num_decodes=metadata.num_decodes,
            batch_invariant=step.batch_invariant,
            plan=plan,
        )
        return self.output(self.norm(out, gate))
