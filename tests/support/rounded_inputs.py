"""What formats with quantized activations make of a matrix's inputs, as hooks of linear layers of `transformers`."""

from collections.abc import Callable

import torch

Hook = Callable[..., tuple[torch.Tensor]]  # a forward pre-hook


def round_to_floats(group: int | None, scale: float | None) -> Hook:
    """Of 8 bits. `scale` None: one for each token or, with `group`, for each so many inputs of it."""

    def hook(module: torch.nn.Linear, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = args
        groups = x.unflatten(-1, (-1, group or x.shape[-1]))
        step = groups.abs().amax(-1, keepdim=True) / 448 if scale is None else torch.tensor(scale)
        return (((groups / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step).flatten(-2),)

    return hook


def round_to_integers(*, symmetric: bool, scale: float | None, zero: int = 0) -> Hook:
    """Of 8 bits, by compressed-tensors' formulas. `scale` None: a scale (and a zero, if not symmetric) a token."""

    def hook(module: torch.nn.Linear, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = args
        offset: torch.Tensor | int = zero
        if scale is not None:
            step = torch.tensor(scale)
        elif symmetric:
            step = x.abs().amax(-1, keepdim=True) / 127.5
        else:
            least, most = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
            step = (most - least) / 255
            offset = (-128 - least / step).round()
        return (((x / step + offset).clamp(-128, 127).round() - offset) * step,)

    return hook
