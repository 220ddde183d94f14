"""The image encoder of Gemma 4: a vision transformer over patches with axial rotation, whose outputs are averaged by
squares and projected to the decoder's width."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from proa.contract import ImageInput
from proa_engine.layers.norm import NormOptions
from proa_engine.layers.vision import (
    AxialRotation,
    Dense,
    GatedFeedForward,
    PatchEmbedding,
    PixelScaling,
    RowFunction,
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

# The model's own code makes them values from -1 to 1; its processor normalises nothing.
HALF = (0.5, 0.5, 0.5)
# Where a folder has no file of an image processor: those of `transformers`.
MAX_TOKENS = 280
BICUBIC = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4VisionOptions:
    input: ImageInput
    scaling: PixelScaling
    depth: int
    hidden_size: int
    inner_size: int
    num_heads: int
    head_dim: int
    output_size: int  # the decoder's width
    patch_size: int  # pixels
    num_positions: int  # learned ones, of rows and of columns
    rope_theta: float
    norm: NormOptions
    clips: bool  # products keep their inputs and outputs within limits of the checkpoint
    standardizes: bool  # averages are shifted and scaled by vectors of the checkpoint
    attends_within: bool  # the decoder's, in its layers with windows
    weights_name: tuple[str, ...] = ("model.vision_tower.", "vision_tower.")

    @property
    def merge(self) -> int:
        """Rows and columns of patches in a token's square."""
        return self.input.unit // self.patch_size

    def config(self) -> ImageConfig:
        return ImageConfig(
            input=self.input,
            embedding_width=self.output_size,
            num_parameters=self._num_parameters(),
            token_values=self.merge**2 * 4 * (2 * self.hidden_size + self.inner_size),
            attends_within=self.attends_within,
        )

    def make(self, weights: Weights) -> "Gemma4VisionEncoder":
        return Gemma4VisionEncoder(weights, self)

    def dense(self, weights: Weights, in_features: int, out_features: int) -> RowFunction:
        product = Dense(weights / "linear", in_features, out_features, bias=False)
        return Clipped(weights, product) if self.clips else product

    def _num_parameters(self) -> int:
        """Number of values in the encoder's matrices."""
        block = 4 * self.num_heads * self.head_dim + 3 * self.inner_size
        embeddings = 3 * self.patch_size**2 + 2 * self.num_positions
        return self.hidden_size * (embeddings + self.depth * block + self.output_size)


class Clipped:
    """A product whose inputs and outputs are kept within limits."""

    def __init__(self, weights: Weights, product: RowFunction) -> None:
        self.product = product
        self.input_limits = weights.take("input_min", ()), weights.take("input_max", ())
        self.output_limits = weights.take("output_min", ()), weights.take("output_max", ())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.clamp(*self.input_limits)).clamp_(*self.output_limits)


class Gemma4VisionEncoder:
    """An `ImageEncoder`. Patches are in the order of tokens, row by row within each token's square."""

    def __init__(self, weights: Weights, options: Gemma4VisionOptions) -> None:
        """`weights` are those of the whole checkpoint."""
        self.options = options
        size, patch = options.hidden_size, options.patch_size
        outer = weights / "model" if weights.has("model.embed_vision.embedding_projection.weight") else weights
        tower = outer / "vision_tower"
        embedder = tower / "patch_embedder"
        kernel = (embedder / "input_proj").take("weight", (size, 3 * patch**2), dtype=torch.float32)
        kernel = kernel.view(size, patch, patch, 3).permute(0, 3, 1, 2)
        self.patches = PatchEmbedding(kernel, None, options.scaling, merge=options.merge)
        self.positions = embedder.take("position_embedding_table", (2, options.num_positions, size))
        turns = frequencies(options.rope_theta, options.head_dim // 4, weights.source.device)
        self.rotation = AxialRotation(turns, turns, merge=options.merge)
        layers = tower / "encoder" / "layers"
        self.blocks = [Gemma4VisionBlock(layers / str(number), options) for number in range(options.depth)]
        if options.standardizes:
            self.mean, self.factor = (tower.take(name, (size,)) for name in ("std_bias", "std_scale"))
        projection = outer / "embed_vision" / "embedding_projection"
        self.projection = Dense(projection, size, options.output_size, bias=False)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [height, width, 3] uint8 -> [tokens, output_size], row by row"""
        options = self.options
        rows, columns = (size // options.patch_size for size in pixels.shape[:2])
        by_column, by_row = self.positions[0, :columns], self.positions[1, :rows]
        positions = in_tiles(by_row[:, None] + by_column, options.merge, options.merge)
        x = self.patches(pixels).to(positions.dtype) + positions
        # The first half of a head turns by the column, the second one by the row.
        cos, sin = (
            each.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flip(-3).flatten(-2)
            for each in self.rotation(rows, columns)
        )
        for block in self.blocks:
            x = block(x, cos, sin)
        # In float32: the factor may leave the range of float16.
        pooled = x.view(-1, options.merge**2, options.hidden_size).float().mean(1) * options.hidden_size**0.5
        if options.standardizes:
            pooled = (pooled - self.mean.float()) * self.factor.float()
        pooled = pooled.to(x.dtype)
        return self.projection(F.rms_norm(pooled, pooled.shape[-1:], eps=options.norm.eps))

    def parameters(self) -> Iterator[torch.Tensor]:
        return tensors_of(self)


class Gemma4VisionBlock:
    def __init__(self, weights: Weights, options: Gemma4VisionOptions) -> None:
        size, width, norm = options.hidden_size, options.num_heads * options.head_dim, options.norm
        attention = weights / "self_attn"
        self.num_heads, self.eps = options.num_heads, norm.eps
        self.inputs = [options.dense(attention / name, size, width) for name in ("q_proj", "k_proj", "v_proj")]
        self.output = options.dense(attention / "o_proj", width, size)
        self.q_norm, self.k_norm = (norm.make(attention / name, options.head_dim) for name in ("q_norm", "k_norm"))
        self.mlp = GatedFeedForward(weights / "mlp", size, options.inner_size, gelu_tanh, options.dense)
        self.before_attention = norm.make(weights / "input_layernorm", size)
        self.after_attention = norm.make(weights / "post_attention_layernorm", size)
        self.before_mlp = norm.make(weights / "pre_feedforward_layernorm", size)
        self.after_mlp = norm.make(weights / "post_feedforward_layernorm", size)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [patches, hidden_size], cos and sin [patches, 1, 2, head_dim / 2] -> x's shape"""
        normed = self.before_attention(x)
        q, k, v = (project(normed).unflatten(1, (self.num_heads, -1)) for project in self.inputs)
        q, k = (
            rotate(norm(each).unflatten(-1, (2, -1)), cos, sin).flatten(-2)
            for norm, each in ((self.q_norm, q), (self.k_norm, k))
        )
        v = F.rms_norm(v, v.shape[-1:], eps=self.eps)
        x = x + self.after_attention(self.output(attend(q, k, v, scale=1.0)))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


def read_gemma4_vision(fields: Fields, files: ImageFiles) -> Gemma4VisionOptions:
    vision, processor = fields["vision_config"], files.processor
    require(vision, "model_type", ("gemma4_vision",))
    require(vision, "hidden_activation", ("gelu_pytorch_tanh",))
    require(vision, "attention_bias", (False,))
    num_heads, head_dim = vision.get("num_attention_heads", 12), vision.get("head_dim", 64)
    require(vision, "num_key_value_heads", (num_heads,))
    if head_dim % 4:
        raise ValueError(f"vision_config.head_dim {head_dim} is not a multiple of 4")
    rope = vision.get("rope_parameters") or {}
    require(rope, "rope_type", ("axial", "default"))
    patch_size, merge = vision.get("patch_size", 16), vision.get("pooling_kernel_size", 3)
    require(processor, "patch_size", (patch_size,))
    require(processor, "pooling_kernel_size", (merge,))
    for name, value in (("do_resize", True), ("do_rescale", True), ("do_normalize", False)):
        require(processor, name, (value,))
    return Gemma4VisionOptions(
        input=_image_input(fields, files, unit=patch_size * merge),
        scaling=PixelScaling(mean=HALF, std=HALF, scale=processor.get("rescale_factor") or 1 / 255),
        depth=vision.get("num_hidden_layers", 16),
        hidden_size=vision.get("hidden_size", 768),
        inner_size=vision.get("intermediate_size", 3072),
        num_heads=num_heads,
        head_dim=head_dim,
        output_size=fields["hidden_size"],
        patch_size=patch_size,
        num_positions=vision.get("position_embedding_size", 10_240),
        rope_theta=rope.get("rope_theta", 100.0),
        norm=NormOptions(vision.get("rms_norm_eps", 1e-6)),
        clips=vision.get("use_clipped_linears", False),
        standardizes=vision.get("standardize", False),
        attends_within=fields.get("use_bidirectional_attention") == "vision",
    )


def _image_input(fields: Fields, files: ImageFiles, unit: int) -> ImageInput:
    token_id, processor = fields["image_token_id"], files.processor
    token = files.tokens.get(token_id, "<|image|>")
    return ImageInput(
        token_id=token_id,
        token=token,
        placeholder=token,
        prefix=files.tokens.get(fields["boi_token_id"], "<|image>"),
        suffix=files.tokens.get(fields["eoi_token_id"], "<image|>"),
        unit=unit,
        max_pixels=processor.get("max_soft_tokens", MAX_TOKENS) * unit**2,
        fills=True,
        resample=files.resample(BICUBIC),
    )
