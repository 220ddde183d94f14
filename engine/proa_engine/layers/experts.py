"""How a checkpoint stores the experts of a layer: matrix by matrix, or each matrix as one tensor of all experts.

Every rank holds a share of each expert's width.
"""

from dataclasses import dataclass
from typing import Protocol

from proa_engine.kernels.moe import ExpertActivation
from proa_engine.kernels.silu_and_mul import silu_and_mul
from proa_engine.layers.context import LayerContext
from proa_engine.layers.weights import Experts, Projection, Slice, StackedExperts, Weights


class ExpertStorage(Protocol):
    """Declares the experts' tensors: a frozen dataclass."""

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        """`inner_size` is that of one expert, before sharding. Raises ValueError if it cannot be sharded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateExperts:
    """down(silu(gate(x)) * up(x)), the three matrices stored under each expert's number."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        start, size = _share(inner_size, context)
        gate_up, down = [], []
        for number in range(num_experts):
            expert = weights / str(number)
            rows, columns = Slice(0, start, size), Slice(1, start, size)
            gate_up.append(
                [Projection(expert / name, inner_size, context.hidden_size, rows) for name in (self.gate, self.up)]
            )
            down.append(Projection(expert / self.down, context.hidden_size, inner_size, columns))
        return weights.method.load_experts(gate_up, down)


PLAIN_EXPERTS = SeparateExperts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """down(activation([gate(x) | up(x)])), stored as `gate_up_proj` and `down_proj` of all experts."""

    activation: ExpertActivation = silu_and_mul
    interleaved: bool = False  # rows of gate and up alternate
    inputs_first: bool = False  # unquantized matrices are [experts, inputs, outputs]
    bias: bool = False

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        start, size = _share(inner_size, context)
        stacked = StackedExperts(
            weights=weights,
            num_experts=num_experts,
            hidden_size=context.hidden_size,
            inner_size=inner_size,
            start=start,
            length=size,
            interleaved=self.interleaved,
            inputs_first=self.inputs_first,
            bias=self.bias,
        )
        return weights.method.load_stacked_experts(stacked, self.activation)


@dataclass(frozen=True, slots=True)
class SeparateOrTogether:
    """Stored as `ExpertTensors` if the checkpoint has these, as `SeparateExperts` if not."""

    inputs_first: bool = False  # as in `ExpertTensors`

    def load(self, weights: Weights, context: LayerContext, num_experts: int, inner_size: int) -> Experts:
        together = ExpertTensors(inputs_first=self.inputs_first)
        storage: ExpertStorage = together if weights.has("gate_up_proj") else PLAIN_EXPERTS
        return storage.load(weights, context, num_experts, inner_size)


def _share(inner_size: int, context: LayerContext) -> tuple[int, int]:
    """This rank's start and length of an expert's width."""
    size = context.parallel.share(inner_size, "inner width of an expert")
    return context.parallel.rank * size, size
