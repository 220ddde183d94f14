"""Quantizes matrices to 4-bit floats as compressed-tensors and ModelOpt store them, without the engine's code."""

import torch

Tensors = dict[str, torch.Tensor]
_NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST = 6.0


def nvfp4_tensors(weight: torch.Tensor, input_scale: float | None = None) -> tuple[Tensors, torch.Tensor]:
    """[outputs, inputs] -> compressed-tensors' nvfp4, and what it stands for. `input_scale`: of quantized inputs."""
    global_scale = 448 * _LARGEST / weight.abs().max()
    packed, scales, dense = _in_groups_of_16(weight, 1 / global_scale)
    stored = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": global_scale.view(1)}
    return stored | ({} if input_scale is None else {"input_global_scale": torch.tensor([input_scale])}), dense


def modelopt_nvfp4_tensors(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / (448 * _LARGEST)
    packed, scales, dense = _in_groups_of_16(weight, scale)
    stored = {"weight": packed, "weight_scale": scales, "weight_scale_2": scale}
    return stored | {"input_scale": torch.tensor(0.01)}, dense


def mxfp4_tensors(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / _LARGEST).log2().ceil().clamp(min=-126)
    packed, dense = _rounded(groups, torch.exp2(exponents))
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, dense


def _in_groups_of_16(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / _LARGEST / scale).to(torch.float8_e4m3fn)
    packed, dense = _rounded(groups, scales.float() * scale)
    return packed, scales, dense


def _rounded(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, groups, group] and its scales -> packed [outputs, inputs / 2], and the numbers [outputs, inputs]"""
    scaled = (groups / scales[..., None]).nan_to_num()
    nearest = (scaled.abs()[..., None] - _NUMBERS).abs().argmin(-1)
    is_negative = scaled < 0
    codes = (nearest + 8 * is_negative).to(torch.uint8).flatten(1)
    numbers = torch.where(is_negative, -_NUMBERS[nearest], _NUMBERS[nearest]) * scales[..., None]
    return codes[:, ::2] | codes[:, 1::2] << 4, numbers.flatten(1)
