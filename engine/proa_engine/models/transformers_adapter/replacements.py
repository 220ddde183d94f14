"""Replace modules of a model of `transformers` by Proa's, each where it is proved to compute the same.

norms      one vector of weights, no other parameters: `rms_norm`
gated      `gate_proj` and `up_proj`, or `gate_up_proj`, and `down_proj`: one product and a fused activation
experts    `gate_up_proj` [experts, 2N, H] and `down_proj` [experts, H, N], called with tokens, experts and weights

On a CPU it gains nothing. Tokens/s of 1 and 16 requests with `LLM.generate` (one thread, AVX-512, float32, random
weights, 6 layers of 512), with this module and `rotation`, and without both:
Helium                     103 and 723, 109 and 740
Ernie 4.5 of 16 experts     88 and 429,  96 and 479
What it gains on a GPU is not measured.
"""

import inspect
from collections.abc import Set
from functools import partial

import torch
from torch import Tensor, nn

from proa_engine.kernels.gpu_linear import make_linear
from proa_engine.kernels.silu_and_mul import activate_and_mul, silu_and_mul
from proa_engine.layers.stacked_experts import make_experts
from proa_engine.models.transformers_adapter.own_modules import OwnExperts, OwnGatedLayers, OwnList, OwnNorm
from proa_engine.models.transformers_adapter.products import joined
from proa_engine.models.transformers_adapter.proofs import activation_of, agree, random_rows

MAX_EPS = 0.1
EXPERTS_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
MERGED = (("gate_proj", "up_proj"), ("gate_up_proj",))


def replace_modules(model: nn.Module, called: Set[nn.Module]) -> None:
    """`called`: the linear layers of `model` that it calls."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.ModuleList:
                setattr(module, name, OwnList(child))
    for module in list(model.modules()):
        for name, child in module.named_children():
            own = _own_norm(child) or _own_experts(child) or _own_gated_layers(child, called)
            if own is not None:
                setattr(module, name, own)


def _own_norm(module: nn.Module) -> OwnNorm | None:
    weight = module._parameters.get("weight")
    if list(module._parameters) != ["weight"] or weight is None or weight.dim() != 1 or module._modules:
        return None

    def is_proved(own: OwnNorm) -> bool:
        # Rows of the size of sqrt(eps) show which number is eps.
        x = random_rows(2, 3, len(weight), like=weight)
        return all(agree(module, own, rows) for rows in (x, x * own.eps**0.5))

    candidates = (
        OwnNorm(weight.detach() if offset == 0 else weight.detach().float() + offset, eps)
        for eps in sorted({value for value in vars(module).values() if type(value) is float and 0 < value < MAX_EPS})
        for offset in (0, 1)
    )
    return next(filter(is_proved, candidates), None)


def _own_gated_layers(module: nn.Module, called: Set[nn.Module]) -> OwnGatedLayers | None:
    names = next((each for each in MERGED if all(name in module._modules for name in each)), None)
    if names is None or "down_proj" not in module._modules:
        return None
    inputs = [layer for name in names if isinstance(layer := module._modules[name], nn.Linear)]
    activation = activation_of(module)
    if activation is None or len(inputs) < len(names) or not set(inputs) <= called:
        return None
    down = module.get_submodule("down_proj")
    x = random_rows(3, inputs[0].in_features, like=inputs[0].weight)

    def compute(rows: Tensor) -> Tensor:
        both = torch.cat([layer(rows[0]) for layer in inputs], dim=-1)
        result: Tensor = down(activate_and_mul(both, activation)[None])
        return result

    if not agree(module, compute, x[None]):
        return None
    return OwnGatedLayers(make_linear(*joined(inputs)), activation, down)


def _own_experts(module: nn.Module) -> OwnExperts | None:
    weights = dict(module.named_parameters())
    if set(weights) != {"gate_up_proj", "down_proj"} or any(each.dim() != 3 for each in weights.values()):
        return None
    gate_up, down = weights["gate_up_proj"].detach(), weights["down_proj"].detach()
    num_experts, hidden_size, inner_size = down.shape
    activation = activation_of(module)
    takes = list(inspect.signature(module.forward).parameters)
    if activation is None or takes != EXPERTS_ARGUMENTS or gate_up.shape != (num_experts, 2 * inner_size, hidden_size):
        return None
    function = silu_and_mul if activation == "silu" else partial(activate_and_mul, activation=activation)
    own = OwnExperts(make_experts((gate_up, down), (None, None), function))
    x = random_rows(5, hidden_size, like=down)
    k = min(2, num_experts)
    chosen = torch.arange(5 * k, device=down.device).view(5, k) % num_experts
    shares = torch.linspace(0.1, 0.9, 5 * k, device=down.device).view(5, k)
    return own if agree(module, own, x, chosen, shares) else None
