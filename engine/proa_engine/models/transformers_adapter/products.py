"""Replace the linear layers of a model of `transformers` by Proa's products, those of one input merged into one."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from proa_engine.kernels.gpu_linear import make_linear

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # siblings with one input


class MergedProduct:
    """Several linear layers of one input. They are called one after the other with the same tensor."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.sizes = [len(layer.weight) for layer in layers]  # of this rank
        self.product = make_linear(*_joined(layers))
        self._input: Tensor | None = None  # of the outputs that are still to be returned
        self._outputs: dict[int, Tensor] = {}

    def output(self, x: Tensor, number: int) -> Tensor:
        """x [..., in_features] -> the output of layer `number`, [..., out_features]"""
        if self._input is not x or number not in self._outputs:
            outputs = self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self._input, self._outputs = x, dict(enumerate(outputs.split(self.sizes, dim=-1)))
        output = self._outputs.pop(number)
        if not self._outputs:
            self._input = None
        return output


class ProductLinear(nn.Module):
    """Stands for one linear layer of a `MergedProduct`."""

    def __init__(self, merged: MergedProduct, number: int, layer: nn.Linear) -> None:
        super().__init__()
        self.merged = merged
        self.number = number
        self.weight = torch.empty_like(layer.weight, device="meta")  # some models ask for its type

    def forward(self, x: Tensor) -> Tensor:
        return self.merged.output(x, self.number)


class CalledLayers:
    """The linear layers of a model that are called, unlike those whose weights the model multiplies by itself."""

    def __init__(self, model: nn.Module) -> None:
        self.called: set[nn.Module] = set()
        linear = [module for module in model.modules() if type(module) is nn.Linear]
        self._hooks = [layer.register_forward_pre_hook(self._add) for layer in linear]

    def _add(self, layer: nn.Module, _: object) -> None:
        self.called.add(layer)

    def end(self) -> set[nn.Module]:
        for hook in self._hooks:
            hook.remove()
        return self.called


def use_products(model: nn.Module, layers: set[nn.Module]) -> None:
    """Replace the linear layers `layers` in `model`. Weights that nothing else holds are freed."""
    for module in list(model.modules()):
        children = {name: child for name, child in module.named_children() if child in layers}
        linear = {name: child for name, child in children.items() if isinstance(child, nn.Linear)}
        for names in _groups(linear):
            merged = MergedProduct([linear[name] for name in names])
            for number, name in enumerate(names):
                setattr(module, name, ProductLinear(merged, number, linear[name]))


def _groups(layers: dict[str, nn.Linear]) -> Iterator[tuple[str, ...]]:
    """The names of `layers`, those together that are merged."""
    single = dict.fromkeys(layers)
    for names in MERGED:
        if set(names) <= layers.keys() and len({layers[name].in_features for name in names}) == 1:
            for name in names:
                del single[name]
            yield names
    for name in single:
        yield (name,)


def _joined(layers: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases; zeros for a layer without a bias beside one that has it."""
    biases = [layer.bias for layer in layers]
    bias = None
    if any(each is not None for each in biases):
        missing = [layer.weight.new_zeros(len(layer.weight)) for layer in layers]
        bias = torch.cat([zero if each is None else each for each, zero in zip(biases, missing, strict=True)])
    weights = [layer.weight.detach() for layer in layers]
    return torch.cat(weights) if len(weights) > 1 else weights[0], None if bias is None else bias.detach()
