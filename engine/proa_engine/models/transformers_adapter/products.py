"""Replace the linear layers of a model of `transformers` by Proa's products, those of one input merged into one."""

from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor, nn

from proa_engine.kernels.gpu_linear import make_linear
from proa_engine.models.transformers_adapter.own_modules import MergedLinear, MergedProduct, OwnLinear

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # siblings with one input


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


def use_products(model: nn.Module, layers: Set[nn.Module]) -> None:
    """Replace the linear layers `layers` in `model`. Weights that nothing else holds are freed."""
    for module in list(model.modules()):
        children = {name: child for name, child in module.named_children() if child in layers}
        linear = {name: child for name, child in children.items() if isinstance(child, nn.Linear)}
        for names in _groups(linear):
            group = [linear[name] for name in names]
            product = make_linear(*joined(group))
            if len(group) == 1:
                setattr(module, names[0], OwnLinear(product, group[0]))
                continue
            merged = MergedProduct(product, [len(layer.weight) for layer in group])
            for number, name in enumerate(names):
                setattr(module, name, MergedLinear(merged, number, linear[name]))


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


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases; zeros for a layer without a bias beside one that has it."""
    biases = [layer.bias for layer in layers]
    bias = None
    if any(each is not None for each in biases):
        missing = [layer.weight.new_zeros(len(layer.weight)) for layer in layers]
        bias = torch.cat([zero if each is None else each for each, zero in zip(biases, missing, strict=True)])
    weights = [layer.weight.detach() for layer in layers]
    return torch.cat(weights) if len(weights) > 1 else weights[0], None if bias is None else bias.detach()
