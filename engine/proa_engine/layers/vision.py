"""Layers of encoders, which run for one image or audio at a time, with the whole weights on every rank.

Products are torch's, of unquantized weights, whatever the decoder's: an encoder has none of a decoder's small batches,
and no adapters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from proa_engine.layers.weights import Weights


class Dense:
    """A product by `weight` and an addition of `bias`."""

    def __init__(self, weights: Weights, in_features: int, out_features: int) -> None:
        self.weight = weights.take("weight", (out_features, in_features))
        self.bias = weights.take("bias", (out_features,))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]"""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelScaling:
    """From 8 bits to the values that an encoder was trained with."""

    mean: tuple[float, ...]  # of the three colors
    std: tuple[float, ...]
    scale: float  # of pixels, before the mean is subtracted


class PatchEmbedding:
    """The convolution over patches, as a product. In float32: it is small, and its inputs have 8 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, scaling: PixelScaling, *, merge: int) -> None:
        """weight [size, colors, patch_size, patch_size] and bias [size] float32. The patches come square by square of
        `merge` rows and columns."""
        self.weight, self.bias, self.merge = weight.flatten(1), bias, merge
        self.patch_size = weight.shape[-1]
        self.mean, self.std = (torch.tensor(values, device=weight.device) for values in (scaling.mean, scaling.std))
        self.scale = scaling.scale

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [height, width, 3] uint8 -> [patches, size] float32"""
        x = patchify(normalised(pixels, self.mean, self.std, self.scale), self.patch_size, self.merge)
        return F.linear(x, self.weight, self.bias)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of all patches of an image, or of all frames of an audio, to each other.

    q, k and v [N, heads, head_dim] -> [N, heads * head_dim]
    """
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1).flatten(1)


def normalised(pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, scale: float) -> torch.Tensor:
    """pixels [height, width, 3] uint8, mean and std [3] float32 -> (pixels * scale - mean) / std, float32"""
    return (pixels.float() * scale - mean) / std


def patchify(image: torch.Tensor, patch_size: int, merge: int) -> torch.Tensor:
    """image [height, width, colors] -> [patches, colors * patch_size * patch_size]"""
    height, width, _ = image.shape
    patches = image.view(height // patch_size, patch_size, width // patch_size, patch_size, -1)
    return in_squares(patches.permute(0, 2, 4, 1, 3), merge).flatten(1)  # from [row, y, column, x, color]


def in_squares(image: torch.Tensor, merge: int) -> torch.Tensor:
    """[rows, columns, …] -> [rows * columns, …], square by square of `merge` rows and columns."""
    rows, columns = image.shape[:2]
    squares = image.reshape(rows // merge, merge, columns // merge, merge, *image.shape[2:])
    return squares.transpose(1, 2).flatten(0, 3)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [patches, heads, head_dim], cos and sin [patches, 1, head_dim] float32 -> x rotated, pairs half a head apart"""
    values = x.float()
    first, second = values.chunk(2, dim=-1)
    return (values * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
