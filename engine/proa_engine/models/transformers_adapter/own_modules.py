"""Proa's computations as modules, in place of those of a model of `transformers`."""

from typing import Any

from torch import Tensor, nn

from proa_engine.kernels.gpu_linear import GpuLinear
from proa_engine.kernels.rms_norm import rms_norm
from proa_engine.kernels.silu_and_mul import ActivationName, activate_and_mul
from proa_engine.layers.weights import Experts


class OwnModule(nn.Module):
    """A module without hooks, whose weights are tensors of `held`, not parameters."""

    held: Any

    # `nn.Module.__call__`, which looks for hooks, takes as long as a small addition.
    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.forward(*args, **options)


class OwnNorm(OwnModule):
    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.held = self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class OwnExperts(OwnModule):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.held = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H]; top_k_index, top_k_weights [T, k] -> [T, H]"""
        result: Tensor = self.held(hidden_states, top_k_weights.float(), top_k_index.int())
        return result


class OwnLinear(OwnModule):
    """`product` in place of `layer`."""

    def __init__(self, product: Any, layer: nn.Linear) -> None:
        super().__init__()
        self.held = product
        self.weight = layer.weight.to("meta")  # some models ask for its type

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.held(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)


class OwnGatedLayers(OwnModule):
    """down(activation(gate) * up) of a product [gate | up]."""

    def __init__(self, product: Any, activation: ActivationName, down: nn.Module) -> None:
        super().__init__()
        self.held = product
        self.activation = activation
        self.is_fused = activation == "silu" and isinstance(product, GpuLinear)
        self.down_proj = down

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inner = self.held.gated(rows) if self.is_fused else activate_and_mul(self.held(rows), self.activation)
        result: Tensor = self.down_proj(inner.view(*x.shape[:-1], -1))
        return result


class MergedProduct:
    """The product of several linear layers of one input. They are called one after the other with the same tensor."""

    def __init__(self, product: Any, sizes: list[int]) -> None:
        self.product = product
        self.sizes = sizes  # of the layers' outputs, on this rank
        self._input: Tensor | None = None  # of the outputs that are still to be returned
        self._outputs: dict[int, Tensor] = {}

    def output(self, x: Tensor, number: int) -> Tensor:
        """x [..., in_features] -> the output of layer `number`, [..., out_features]"""
        if self._input is not x or number not in self._outputs:
            outputs = self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self._input, self._outputs = x, dict(enumerate(outputs.split_with_sizes(self.sizes, dim=-1)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._input = None
        return output


class MergedLinear(OwnLinear):
    """Stands for one linear layer of a `MergedProduct`."""

    def __init__(self, merged: MergedProduct, number: int, layer: nn.Linear) -> None:
        super().__init__(merged, layer)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.held.output(x, self.number)
        return output


class OwnList(nn.ModuleList):
    """Models take the slice of all their layers, of which `nn.ModuleList` makes a new module."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return self
        return super().__getitem__(index)


def hold_children(model: nn.Module) -> None:
    """Make the children of all modules plain attributes too, because `nn.Module.__getattr__` takes 1 us."""
    for module in model.modules():
        module.__dict__.update(module._modules)
