"""RMSNorm, optionally after a residual add, with its result quantized or deferred as the next product requires; and
LayerNorm."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from proa_engine.kernels.fp8 import Fp8Form
from proa_engine.kernels.gated_group_norm import gated_group_norm, gated_values
from proa_engine.kernels.products.skinny_gemm import Activation, InputForm, PlainRows, unnormed_rows
from proa_engine.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_fp8
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.shares import Share
from proa_engine.layers.weights import Slice, Weights


@dataclass(frozen=True, slots=True)
class NormOptions:
    eps: float
    offset: float = 0.0  # added to the stored weights (Gemma stores weight - 1)

    def take_weight(self, weights: Weights, size: int, part: Slice | None = None) -> torch.Tensor:
        """[size], or `part` of it. With an offset in float32, because 16 bits would round the sum coarsely."""
        if not self.offset:
            return weights.take("weight", (size,), part)
        return weights.take("weight", (size,), part, torch.float32) + self.offset

    def make(self, weights: Weights, size: int) -> "RMSNorm":
        return RMSNorm(weights, size, self)


@dataclass(frozen=True, slots=True)
class LayerNormOptions:
    eps: float

    def make(self, weights: Weights, size: int) -> "LayerNorm":
        return LayerNorm(weights, size, self.eps)


class RMSNorm:
    def __init__(self, weights: Weights, size: int, options: NormOptions) -> None:
        self.weight = options.take_weight(weights, size)
        self.eps = options.eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape, normalised over the last dimension."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> (norm(x + residual), x + residual), [T, size] each; may overwrite both inputs."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def into(self, form: InputForm, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Activation, torch.Tensor]:
        """x, residual [T, size] -> (norm(x + residual), x + residual), the norm in the form that the next product
        requires.

        May overwrite both inputs. If the product computes the norm, the sum is valid only after the product.
        """
        rows_form = form.for_rows(x.shape[0])
        if isinstance(rows_form, PlainRows):
            return (self(x), x) if residual is None else add_rms_norm(x, residual, self.weight, self.eps)
        if isinstance(rows_form, Fp8Form):
            return rms_norm_fp8(x, residual, self.weight, self.eps, rows_form)
        rows = unnormed_rows(x, residual, self.weight, self.eps)
        return rows, rows.total


class LayerNorm:
    def __init__(self, weights: Weights, size: int, eps: float) -> None:
        self.weight = weights.take("weight", (size,))
        self.bias = weights.take("bias", (size,))
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape, normalised over the last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> (norm(x + residual), x + residual), [T, size] each; may overwrite `x`."""
        total = x.add_(residual)
        return self(total), total

    def into(
        self, form: InputForm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm.into`. The next product quantizes its input, if it must be."""
        total, _ = ResidualSum().into(form, x, residual)
        return self(total), total


class ShardedNorm:
    """RMSNorm over values of which each rank holds a share. A share may be on several ranks."""

    def __init__(self, weights: Weights, share: Share, options: NormOptions, parallel: ParallelContext) -> None:
        self.weight = options.take_weight(weights, share.total, share.along(0))
        self.eps = options.eps
        self.share = share
        self.parallel = parallel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, this rank's values] -> the same shape"""
        if self.parallel.world_size == 1:
            return rms_norm(x, self.weight, self.eps)
        values = x.float()
        squares = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square()
        if not self.share.is_counted:
            squares = torch.zeros_like(squares)
        squares = self.parallel.all_reduce(squares)
        return (values * torch.rsqrt(squares / self.share.total + self.eps) * self.weight).to(x.dtype)


class GatedGroupNorm:
    """RMSNorm of x * silu(gate) over each group of values, of which a rank holds some, or a part of one."""

    def __init__(
        self, weights: Weights, values: Share, groups: Share, options: NormOptions, parallel: ParallelContext
    ) -> None:
        self.weight = options.take_weight(weights, values.total, values.along(0))
        self.eps = options.eps
        self.groups = groups
        self.group_size = values.total // groups.total
        self.parallel = parallel

    def __call__(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate [T, this rank's values] -> the same shape"""
        if self.groups.total >= self.parallel.world_size:  # so every rank has whole groups
            return gated_group_norm(x, gate, self.weight, self.group_size, self.eps)
        values = gated_values(x, gate)
        squares = values.new_zeros(len(x), self.groups.total)
        own = squares[:, self.groups.start : self.groups.start + 1]
        own.copy_(torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_())
        squares = self.parallel.all_reduce(squares)
        own = squares[:, self.groups.start : self.groups.start + 1]
        return values.mul_(torch.rsqrt(own / self.group_size + self.eps)).mul_(self.weight).to(x.dtype)


class ResidualSum:
    """In place of an `RMSNorm` before a layer's part, where the model has none: only the residual add."""

    def into(
        self, form: InputForm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> x + residual, twice; may overwrite `x`."""
        total = x if residual is None else x.add_(residual)
        return total, total
