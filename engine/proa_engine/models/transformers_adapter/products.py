"""Replace the linear layers of a model of `transformers` by Proa's products.

On a CPU a row's bits then do not depend on the number of rows, so outputs do not depend on how requests are batched.

Other modules stay the library's. Proa's norms, gated layers, experts, merged products and rotation in their places
gained nothing on a CPU (one thread, AVX-512, float32, 6 layers of 512; prefill of 256 tokens, decode of 1 and 16):
                           with them             without
Helium                     76, 8.8, 22.4 ms      76, 8.8, 23.5 ms
Ernie 4.5 of 16 experts    99, 9.1, 49.7 ms      97, 10.0, 40.8 ms
"""

from collections.abc import Set

from torch import Tensor, nn

from proa_engine.kernels.products.gpu_linear import make_linear


class OwnLinear(nn.Module):
    """Proa's product in place of `layer`. Its weights are no parameters."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.product = make_linear(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
        self.weight = layer.weight.to("meta")  # some models ask for its type

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(x.reshape(-1, x.shape[-1]).contiguous())
        return y.view(*x.shape[:-1], -1)


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
        for name, child in module.named_children():
            if child in layers and isinstance(child, nn.Linear):
                setattr(module, name, OwnLinear(child))
