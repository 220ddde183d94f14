"""The image encoders of Qwen2.5-VL, and of Qwen3-VL and Qwen3.5: a vision transformer over patches, whose outputs are
merged by squares."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from proa.contract import ImageInput
from proa_engine.layers.norm import LayerNormOptions, NormOptions
from proa_engine.layers.vision import (
    CLIP_MEAN,
    CLIP_STD,
    AxialRotation,
    Dense,
    FeedForward,
    GatedFeedForward,
    PatchEmbedding,
    PixelScaling,
    Windows,
    attend,
    frequencies,
    gelu_tanh,
    in_tiles,
    rotate,
)
from proa_engine.layers.weights import Weights
from proa_engine.models.decoder import tensors_of
from proa_engine.models.fields import Fields, require
from proa_engine.models.image_config import ImageConfig
from proa_engine.models.image_files import ImageFiles

EPS = 1e-6

IMAGE_TOKEN = "<|image_pad|>"
# Where a folder has no file of an image processor: those of `transformers`.
MIN_PIXELS = 56 * 56
MAX_PIXELS = 28 * 28 * 1280
BICUBIC = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionForm:
    """What a generation of the encoder is made of."""

    defaults: Mapping[str, Any]  # fields that `vision_config` may omit
    norm: NormOptions | LayerNormOptions
    is_gated: bool  # the feed-forward layers
    patch_bias: bool


QWEN2_5 = QwenVisionForm(
    defaults={
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": (7, 15, 23, 31),
    },
    norm=NormOptions(EPS),
    is_gated=True,
    patch_bias=False,
)
QWEN3 = QwenVisionForm(
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "patch_size": 16,
        "num_position_embeddings": 2304,
    },
    norm=LayerNormOptions(EPS),
    is_gated=False,
    patch_bias=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionOptions:
    form: QwenVisionForm
    input: ImageInput
    scaling: PixelScaling
    depth: int
    hidden_size: int
    inner_size: int
    num_heads: int
    output_size: int  # the decoder's width
    patch_size: int  # pixels
    frames: int  # that the checkpoint's patches have; an image repeats its only one
    merge: int  # a token has this many rows and columns of patches
    grid: int  # rows and columns of the learned position embeddings; 0: there are none
    rope_theta: float
    deepstack: tuple[int, ...]  # layers whose outputs are added behind the decoder's first layers
    window: int  # rows and columns of tokens that attend to each other; 0: those of the image
    whole: tuple[int, ...]  # layers whose patches attend to the whole image nevertheless
    weights_name: tuple[str, ...] = ("model.visual.", "visual.")

    def config(self) -> ImageConfig:
        patches = self.merge**2
        return ImageConfig(
            input=self.input,
            embedding_width=self.output_size * (1 + len(self.deepstack)),
            num_parameters=self._num_parameters(),
            # On a CPU an image of 1024 tokens takes 89,000 a token in float32 and 99,000 in bfloat16, where this is
            # 106,000 (27 layers of 1152): some of what the products return is freed late.
            token_values=patches * 4 * (2 * self.hidden_size + self.inner_size),
            has_three_positions=True,
        )

    def make(self, weights: Weights) -> "QwenVisionEncoder":
        outer = weights / "model" if weights.has("model.visual.patch_embed.proj.weight") else weights
        return QwenVisionEncoder(outer / "visual", self)

    def _num_parameters(self) -> int:
        """Number of values in the encoder's matrices."""
        merged = self.hidden_size * self.merge**2
        inner = (3 if self.form.is_gated else 2) * self.inner_size
        block = self.hidden_size * (4 * self.hidden_size + inner)
        merger = merged * (merged + self.output_size)
        embeddings = self.hidden_size * (3 * self.patch_size**2 + self.grid**2)
        return embeddings + self.depth * block + (1 + len(self.deepstack)) * merger


class QwenVisionEncoder:
    """An `ImageEncoder`. A row of its result is a token's embedding, then what is added to the token behind each of the
    decoder's first layers (DeepStack, Meng et al., 2024, arXiv 2406.04334).

    Patches are in the order of tokens, row by row within each token's square.
    """

    def __init__(self, weights: Weights, options: QwenVisionOptions) -> None:
        self.options = options
        self.patches = _patch_embedding(weights / "patch_embed" / "proj", options)
        if options.grid:
            self.positions = PatchPositions(weights / "pos_embed", options)
        quarter = options.hidden_size // options.num_heads // 4
        turns = frequencies(options.rope_theta, quarter, weights.source.device)
        self.rotation = AxialRotation(turns, turns, merge=options.merge)
        self.blocks = [QwenVisionBlock(weights / "blocks" / str(number), options) for number in range(options.depth)]
        self.merger = Merger(weights / "merger", options, norms_squares=False)
        lists = weights / "deepstack_merger_list"
        self.deepstack = [Merger(lists / str(i), options, norms_squares=True) for i in range(len(options.deepstack))]
        self.merger_of = dict(zip(options.deepstack, self.deepstack, strict=True))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [height, width, 3] uint8 -> [tokens, (1 + DeepStack layers) * output_size]"""
        options = self.options
        rows, columns = (size // options.patch_size for size in pixels.shape[:2])
        x = self.patches(pixels).to(self.merger.first.weight.dtype)
        if options.grid:
            x = x + self.positions(rows, columns).to(x.dtype)
        squares = rows // options.merge, columns // options.merge
        windows = Windows.of(*squares, options.window or max(squares), x.device)
        x, cos, sin = (windows.sort(each) for each in (x, *self.rotation(rows, columns)))
        sizes = [(count, tokens * options.merge**2) for count, tokens in windows.sizes]
        added = []
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin, () if number in options.whole else sizes)
            if number in self.merger_of:
                added.append(self.merger_of[number](x))
        return windows.restore(torch.cat((self.merger(x), *added), dim=-1))

    def parameters(self) -> Iterator[torch.Tensor]:
        return tensors_of(self)


class PatchPositions:
    """A learned embedding of a patch's place in its image, interpolated."""

    def __init__(self, weights: Weights, options: QwenVisionOptions) -> None:
        self.grid, self.merge = options.grid, options.merge
        self.table = weights.take("weight", (options.grid**2, options.hidden_size))

    def __call__(self, rows: int, columns: int) -> torch.Tensor:
        """Return the position embeddings of an image of rows x columns patches, [patches, hidden_size] float32: the
        grid is stretched over the image, corner to corner, and interpolated bilinearly."""
        table = self.table.float()
        by_row = (self._shares(rows) @ table.view(self.grid, -1)).view(rows, self.grid, -1)
        return in_tiles(self._shares(columns) @ by_row, self.merge, self.merge)

    def _shares(self, size: int) -> torch.Tensor:
        """How much of each of the grid's lines each of `size` lines of patches takes, [size, grid] float32."""
        device = self.table.device
        places = torch.arange(size, device=device) * (self.grid - 1) / max(size - 1, 1)
        return (1 - (places[:, None] - torch.arange(self.grid, device=device)).abs()).clamp_(min=0)


class QwenVisionBlock:
    def __init__(self, weights: Weights, options: QwenVisionOptions) -> None:
        size, inner, norm = options.hidden_size, options.inner_size, options.form.norm
        self.num_heads = options.num_heads
        self.norm1, self.norm2 = norm.make(weights / "norm1", size), norm.make(weights / "norm2", size)
        self.qkv = Dense(weights / "attn" / "qkv", size, 3 * size)
        self.output = Dense(weights / "attn" / "proj", size, size)
        mlp = weights / "mlp"
        self.mlp: GatedFeedForward | FeedForward
        if options.form.is_gated:
            self.mlp = GatedFeedForward(mlp, size, inner, F.silu, Dense)
        else:
            up, down = Dense(mlp / "linear_fc1", size, inner), Dense(mlp / "linear_fc2", inner, size)
            self.mlp = FeedForward(up, down, gelu_tanh)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, windows: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """x [patches, hidden_size] -> the same shape. `windows`: as of `attend`."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        x = x + self.output(attend(rotate(q, cos, sin), rotate(k, cos, sin), v, windows))
        return x + self.mlp(self.norm2(x))


class Merger:
    """Makes one row of the patches of each square."""

    def __init__(self, weights: Weights, options: QwenVisionOptions, *, norms_squares: bool) -> None:
        """`norms_squares`: the norm is over a whole square, not over each patch."""
        self.size = options.hidden_size * options.merge**2
        self.norms_squares = norms_squares
        self.norm = options.form.norm.make(weights / "norm", self.size if norms_squares else options.hidden_size)
        self.first = Dense(weights / "linear_fc1", self.size, self.size)
        self.second = Dense(weights / "linear_fc2", self.size, options.output_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [patches, hidden_size] -> [tokens, output_size]"""
        x = self.norm(x.view(-1, self.size)) if self.norms_squares else self.norm(x).view(-1, self.size)
        return self.second(F.gelu(self.first(x)))


def _patch_embedding(weights: Weights, options: QwenVisionOptions) -> PatchEmbedding:
    size, patch = options.hidden_size, options.patch_size
    kernel = weights.take("weight", (size, 3, options.frames, patch, patch), dtype=torch.float32)
    bias = weights.take("bias", (size,), dtype=torch.float32) if options.form.patch_bias else None
    # All frames of an image are equal, so the sum of their weights is enough.
    return PatchEmbedding(kernel.sum(2), bias, options.scaling, merge=options.merge)


def read_qwen_vision(
    fields: Fields, files: ImageFiles, form: QwenVisionForm, deepstack: Sequence[int] = ()
) -> QwenVisionOptions:
    """`deepstack`: `deepstack_visual_indexes` where `vision_config` has none."""
    vision, processor = {**form.defaults, **fields["vision_config"]}, files.processor
    require(vision, "hidden_act", (form.defaults["hidden_act"],))
    for name in ("in_channels", "in_chans"):
        require(vision, name, (3,))
    rope = vision.get("rope_parameters") or {}
    require(rope, "rope_type", ("axial", "default"))
    patch_size, merge = _size(vision, "patch_size"), vision.get("spatial_merge_size", 2)
    frames = _frames(vision)
    require(processor, "patch_size", (patch_size,))
    require(processor, "merge_size", (merge,))
    require(processor, "temporal_patch_size", (frames,))
    output_size = vision.get("out_hidden_size", 3584)
    require({"out_hidden_size": output_size}, "out_hidden_size", (fields["hidden_size"],))
    hidden_size, num_heads = vision["hidden_size"], vision.get("num_heads", 16)
    if hidden_size % (4 * num_heads):
        raise ValueError(f"vision_config.hidden_size {hidden_size} is not a multiple of 4 x {num_heads} heads")
    unit = patch_size * merge
    return QwenVisionOptions(
        form=form,
        input=_image_input(fields, files, unit),
        scaling=files.pixel_scaling(CLIP_MEAN, CLIP_STD),
        depth=vision["depth"],
        hidden_size=hidden_size,
        inner_size=vision["intermediate_size"],
        num_heads=num_heads,
        output_size=output_size,
        patch_size=patch_size,
        frames=frames,
        merge=merge,
        grid=int(vision.get("num_position_embeddings", 0) ** 0.5),
        rope_theta=rope.get("rope_theta", 10_000.0),
        deepstack=tuple(vision.get("deepstack_visual_indexes", deepstack)),
        window=vision.get("window_size", 0) // unit,
        whole=tuple(vision.get("fullatt_block_indexes", ())),
    )


def _image_input(fields: Fields, files: ImageFiles, unit: int) -> ImageInput:
    processor: Fields = files.processor
    size: dict[str, Any] = processor.get("size") or {}
    token_id = fields["image_token_id"]
    token = files.tokens.get(token_id, IMAGE_TOKEN)
    return ImageInput(
        token_id=token_id,
        token=token,
        placeholder=token,
        unit=unit,
        min_pixels=processor.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS,
        max_pixels=processor.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS,
        resample=files.resample(BICUBIC),
    )


def _size(vision: Fields, name: str) -> int:
    """A field that may also be the same number twice."""
    value = vision[name]
    first: int = value[0] if isinstance(value, list) else value
    require({name: value}, name, (first, [first, first]))
    return first


def _frames(vision: Fields) -> int:
    value = vision.get("temporal_patch_size", 2)
    frames: int = value[0] if isinstance(value, list) else value
    return frames
