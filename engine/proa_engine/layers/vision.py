"""Layers of encoders, which run for one image or audio at a time, with the whole weights on every rank.

Products are torch's, of unquantized weights, whatever the decoder's: an encoder has none of a decoder's small batches,
and no adapters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F

from proa_engine.layers.weights import Weights

RowFunction = Callable[[torch.Tensor], torch.Tensor]  # of each row alone
# Of the colors of the images that CLIP was trained with, as of those of other encoders.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Dense:
    """A product by `weight` and an addition of `bias`, if there is one."""

    def __init__(self, weights: Weights, in_features: int, out_features: int, *, bias: bool = True) -> None:
        self.weight = weights.take("weight", (out_features, in_features))
        self.bias = weights.take("bias", (out_features,)) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]"""
        return F.linear(x, self.weight, self.bias)


class FeedForward:
    """down(activation(up(x)))"""

    def __init__(self, up: Dense, down: Dense, activation: RowFunction) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape"""
        return self.down(self.activation(self.up(x)))


class GatedFeedForward:
    """down(activation(gate(x)) * up(x))"""

    def __init__(
        self,
        weights: Weights,
        size: int,
        inner_size: int,
        activation: RowFunction,
        dense: Callable[[Weights, int, int], RowFunction],
    ) -> None:
        """`dense` makes a product from its weights and its numbers of inputs and outputs."""
        self.gate = dense(weights / "gate_proj", size, inner_size)
        self.up = dense(weights / "up_proj", size, inner_size)
        self.down = dense(weights / "down_proj", inner_size, size)
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape"""
        return self.down(self.activation(self.gate(x)).mul_(self.up(x)))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelScaling:
    """From 8 bits to the values that an encoder was trained with."""

    mean: tuple[float, ...]  # of the three colors
    std: tuple[float, ...]
    scale: float  # of pixels, before the mean is subtracted


class PatchEmbedding:
    """The convolution over patches, as a product. In float32: it is small, and its inputs have 8 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, scaling: PixelScaling, *, merge: int) -> None:
        """weight [size, colors, patch_size, patch_size] and bias [size], if there is one, float32. The patches come
        square by square of `merge` rows and columns."""
        self.weight, self.bias, self.merge = weight.flatten(1), bias, merge
        self.patch_size = weight.shape[-1]
        self.mean, self.std = (torch.tensor(values, device=weight.device) for values in (scaling.mean, scaling.std))
        self.scale = scaling.scale

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [height, width, 3] uint8 -> [patches, size] float32"""
        x = patchify(normalised(pixels, self.mean, self.std, self.scale), self.patch_size, self.merge)
        return F.linear(x, self.weight, self.bias)


def frequencies(theta: float, count: int, device: torch.device) -> torch.Tensor:
    """theta ** (-n / count) for n below `count`, [count] float32."""
    return 1.0 / theta ** (torch.arange(count, device=device) / count)


class AxialRotation:
    """Rotation of queries and keys by the row and the column of their patch."""

    def __init__(self, by_row: torch.Tensor, by_column: torch.Tensor, *, merge: int) -> None:
        """by_row, by_column [head_dim / 4] float32: frequencies. `merge`: as of `PatchEmbedding`."""
        self.by_row, self.by_column, self.merge = by_row, by_column, merge

    def __call__(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the patches' angles, [patches, 1, head_dim] float32: of the row, then of the column, twice."""
        of_rows = torch.arange(rows, device=self.by_row.device)[:, None] * self.by_row
        of_columns = torch.arange(columns, device=self.by_row.device)[:, None] * self.by_column
        shape = rows, columns, -1
        angles = torch.cat((of_rows[:, None].expand(shape), of_columns[None].expand(shape)), dim=-1)
        angles = in_tiles(torch.cat((angles, angles), dim=-1), self.merge, self.merge)[:, None]
        return angles.cos(), angles.sin()


@dataclass(frozen=True, slots=True)
class Windows:
    """The tokens of an image in the order of windows that attend alone. `sizes`: of each group of equal windows, in
    this order, their number and their number of tokens."""

    order: torch.Tensor  # [tokens]: numbers of tokens, row by row
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, rows: int, columns: int, side: int, device: torch.device) -> "Windows":
        """Windows of `side` rows and columns of tokens; those at the right and the lower edge have the rest."""
        numbers = torch.arange(rows * columns, device=device).view(rows, columns)
        ends = [((0, size - size % side, side), (size - size % side, size, size % side)) for size in (rows, columns)]
        parts = [
            (numbers[top:bottom, left:right], height, width)
            for (top, bottom, height), (left, right, width) in product(*ends)
            if top < bottom and left < right
        ]
        order = torch.cat([in_tiles(part, height, width) for part, height, width in parts])
        sizes = ((part.numel() // (height * width), height * width) for part, height, width in parts)
        return cls(order, tuple(sizes))

    def sort(self, x: torch.Tensor) -> torch.Tensor:
        """x [patches, ...], token by token -> the same, window by window"""
        return x.view(len(self.order), -1, *x.shape[1:])[self.order].flatten(0, 1)

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, ...], window by window -> the same, row by row"""
        return x[self.order.argsort()]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    windows: Sequence[tuple[int, int]] = (),
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of all patches of an image, or of all frames of an audio, to each other; or within each of `windows`,
    of which there are, in order, so many with so many patches. `scale`: of the scores; None: 1 / sqrt(head_dim).

    q, k and v [N, heads, head_dim] -> [N, heads * head_dim]
    """
    windows = windows or ((1, len(q)),)
    groups = zip(*(each.split([count * size for count, size in windows]) for each in (q, k, v)), strict=True)
    results = []
    for group, window in zip(groups, windows, strict=True):
        query, key, value = (each.unflatten(0, window).transpose(1, 2) for each in group)
        results.append(F.scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).flatten(2))
    return torch.cat([each.flatten(0, 1) for each in results])


def normalised(pixels: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, scale: float) -> torch.Tensor:
    """pixels [height, width, 3] uint8, mean and std [3] float32 -> (pixels * scale - mean) / std, float32"""
    return (pixels.float() * scale - mean) / std


def patchify(image: torch.Tensor, patch_size: int, merge: int) -> torch.Tensor:
    """image [height, width, colors] -> [patches, colors * patch_size * patch_size]"""
    height, width, _ = image.shape
    patches = image.view(height // patch_size, patch_size, width // patch_size, patch_size, -1)
    return in_tiles(patches.permute(0, 2, 4, 1, 3), merge, merge).flatten(1)  # from [row, y, column, x, color]


def in_tiles(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """[rows, columns, …] -> [rows * columns, …], tile by tile of `height` rows and `width` columns."""
    rows, columns = image.shape[:2]
    tiles = image.reshape(rows // height, height, columns // width, width, *image.shape[2:])
    return tiles.transpose(1, 2).flatten(0, 3)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [patches, heads, head_dim], cos and sin [patches, 1, head_dim] float32 -> x rotated, pairs half a head apart"""
    values = x.float()
    first, second = values.chunk(2, dim=-1)
    return (values * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
