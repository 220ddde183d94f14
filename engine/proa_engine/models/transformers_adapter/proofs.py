"""Whether Proa's computation of a module of `transformers` gives that module's result: tried on random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from proa_engine.kernels.silu_and_mul import ActivationName, activate_and_mul

# Of the result's norm. The library and Proa round to 16 bits at different places.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ACTIVATIONS: tuple[ActivationName, ...] = ("silu", "gelu_tanh")
NUM_TRIED = 241  # inputs of an activation
ACTIVATION_FIELDS = ("act_fn", "activation_fn", "act")


def random_rows(*shape: int, like: Tensor) -> Tensor:
    """The same random numbers every time, whose mean is not 0, in the type and on the device of `like`."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) + 0.5).to(like)


def agree(theirs: Callable[..., Any], ours: Callable[..., Any], *inputs: Tensor) -> bool:
    """Whether both return the same numbers of the same type and shape. False if `theirs` cannot be called so."""
    try:
        expected = theirs(*inputs)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    result = ours(*inputs)
    if not isinstance(expected, Tensor) or (expected.shape, expected.dtype) != (result.shape, result.dtype):
        return False
    error = (result.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return bool((error < TOLERANCE[expected.dtype]).all())


def activation_of(module: nn.Module) -> ActivationName | None:
    """The name of the function that `module` holds as its activation, None if Proa does not have it."""
    function = next((getattr(module, name) for name in ACTIVATION_FIELDS if hasattr(module, name)), None)
    if function is None:
        return None
    gate = torch.linspace(-6, 6, NUM_TRIED)[None]
    pair = torch.cat((gate, torch.ones_like(gate)), dim=-1)

    def computes(name: ActivationName) -> bool:
        return agree(lambda rows: function(rows[:, :NUM_TRIED]), lambda rows: activate_and_mul(rows, name), pair)

    return next((name for name in ACTIVATIONS if computes(name)), None)
