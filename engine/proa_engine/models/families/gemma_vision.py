"""The image encoder of Gemma 3: SigLIP's vision transformer (Zhai et al., 2023, arXiv 2303.15343) over the patches of a
square image, whose outputs are averaged by squares and projected to the decoder's width."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

import torch

from proa.contract import ImageInput
from proa_engine.layers.norm import LayerNorm, NormOptions, RMSNorm
from proa_engine.layers.vision import Dense, FeedForward, PatchEmbedding, PixelScaling, attend, gelu_tanh
from proa_engine.layers.weights import Weights
from proa_engine.models.decoder import tensors_of
from proa_engine.models.fields import Fields, require
from proa_engine.models.image_config import ImageConfig
from proa_engine.models.image_files import ImageFiles

# Where a folder has no file of an image processor: those of `transformers`.
MEAN = STD = (0.5, 0.5, 0.5)
BILINEAR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaVisionOptions:
    input: ImageInput
    scaling: PixelScaling
    depth: int
    hidden_size: int
    inner_size: int
    num_heads: int
    output_size: int  # the decoder's width
    patch_size: int  # pixels
    eps: float  # of all norms
    weights_name: tuple[str, ...] = ("vision_tower.", "model.vision_tower.")

    @property
    def merge(self) -> int:
        """Rows and columns of patches in a token's square."""
        return self.input.unit // self.patch_size

    @property
    def num_patches(self) -> int:
        """Number of patches of an image."""
        return (self.input.side // self.patch_size) ** 2

    def config(self) -> ImageConfig:
        return ImageConfig(
            input=self.input,
            embedding_width=self.output_size,
            num_parameters=self._num_parameters(),
            # On a CPU an image takes 0.43 GiB in float32, where this is 0.40 (layers of 1152).
            token_values=self.merge**2 * 4 * (2 * self.hidden_size + self.inner_size),
            attends_within=True,
        )

    def make(self, weights: Weights) -> "GemmaVisionEncoder":
        return GemmaVisionEncoder(weights, self)

    def _num_parameters(self) -> int:
        """Number of values in the encoder's matrices."""
        block = 4 * self.hidden_size + 2 * self.inner_size
        return self.hidden_size * (3 * self.patch_size**2 + self.num_patches + self.depth * block + self.output_size)


class GemmaVisionEncoder:
    """An `ImageEncoder`."""

    def __init__(self, weights: Weights, options: GemmaVisionOptions) -> None:
        self.options = options
        tower, projector = _parts(weights)
        size, patch = options.hidden_size, options.patch_size
        inner = tower / "embeddings" / "patch_embedding"
        weight = inner.take("weight", (size, 3, patch, patch), dtype=torch.float32)
        bias = inner.take("bias", (size,), dtype=torch.float32)
        self.patches = PatchEmbedding(weight, bias, options.scaling, merge=1)
        self.positions = (tower / "embeddings" / "position_embedding").take("weight", (options.num_patches, size))
        layers = tower / "encoder" / "layers"
        self.blocks = [GemmaVisionBlock(layers / str(number), options) for number in range(options.depth)]
        self.norm = LayerNorm(tower / "post_layernorm", size, options.eps)
        self.pooled_norm = RMSNorm(projector / "mm_soft_emb_norm", size, NormOptions(options.eps, offset=1.0))
        self.projection = projector.take("mm_input_projection_weight", (size, options.output_size))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [side, side, 3] uint8 -> [tokens, output_size], row by row"""
        x = self.patches(pixels).to(self.positions.dtype) + self.positions
        for block in self.blocks:
            x = block(x)
        side, merge = self.options.input.side // self.options.input.unit, self.options.merge
        pooled = self.norm(x).view(side, merge, side, merge, -1).mean((1, 3)).flatten(0, 1)
        return self.pooled_norm(pooled) @ self.projection

    def parameters(self) -> Iterator[torch.Tensor]:
        return tensors_of(self)


class GemmaVisionBlock:
    def __init__(self, weights: Weights, options: GemmaVisionOptions) -> None:
        size, inner_size = options.hidden_size, options.inner_size
        attention, mlp = weights / "self_attn", weights / "mlp"
        self.num_heads = options.num_heads
        self.norm1 = LayerNorm(weights / "layer_norm1", size, options.eps)
        self.norm2 = LayerNorm(weights / "layer_norm2", size, options.eps)
        self.inputs = [Dense(attention / name, size, size) for name in ("q_proj", "k_proj", "v_proj")]
        self.output = Dense(attention / "out_proj", size, size)
        self.mlp = FeedForward(Dense(mlp / "fc1", size, inner_size), Dense(mlp / "fc2", inner_size, size), gelu_tanh)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [patches, hidden_size] -> the same shape"""
        normed = self.norm1(x)
        q, k, v = (project(normed).unflatten(1, (self.num_heads, -1)) for project in self.inputs)
        x = x + self.output(attend(q, k, v))
        return x + self.mlp(self.norm2(x))


def _parts(weights: Weights) -> tuple[Weights, Weights]:
    """The tower's weights and the projector's, whose names depend on the release that wrote the checkpoint."""
    outer = weights if weights.has("multi_modal_projector.mm_input_projection_weight") else weights / "model"
    tower = outer / "vision_tower"
    if tower.has("vision_model.post_layernorm.weight"):
        tower = tower / "vision_model"
    return tower, outer / "multi_modal_projector"


def read_gemma_vision(fields: Fields, files: ImageFiles) -> GemmaVisionOptions:
    vision, processor = fields["vision_config"], files.processor
    require(vision, "model_type", ("siglip_vision_model",))
    require(vision, "hidden_act", ("gelu_pytorch_tanh",))
    require(vision, "num_channels", (3,))
    require(processor, "do_pan_and_scan", (False,))
    hidden_size, num_heads = vision.get("hidden_size", 768), vision.get("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise ValueError(f"vision_config.hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    patch_size = vision.get("patch_size", 16)
    return GemmaVisionOptions(
        input=_image_input(fields, files, patch_size),
        scaling=files.pixel_scaling(MEAN, STD),
        depth=vision.get("num_hidden_layers", 12),
        hidden_size=hidden_size,
        inner_size=vision.get("intermediate_size", 3072),
        num_heads=num_heads,
        output_size=fields["hidden_size"],
        patch_size=patch_size,
        eps=vision.get("layer_norm_eps", 1e-6),
    )


def _image_input(fields: Fields, files: ImageFiles, patch_size: int) -> ImageInput:
    processor, side = files.processor, fields["vision_config"].get("image_size", 224)
    for name, value in (processor.get("size") or {}).items():
        if value != side:
            raise ValueError(f"{name} {value} of the image processor is not the encoder's image_size {side}")
    num_tokens = fields["mm_tokens_per_image"]
    tokens_per_side = isqrt(num_tokens)
    if tokens_per_side**2 != num_tokens or side % (patch_size * tokens_per_side):
        raise ValueError(f"mm_tokens_per_image {num_tokens} does not divide an image of {side} x {side} pixels")
    token_id = fields["image_token_index"]
    begin = files.tokens.get(fields["boi_token_index"], "<start_of_image>")
    end = files.tokens.get(fields["eoi_token_index"], "<end_of_image>")
    return ImageInput(
        token_id=token_id,
        token=files.tokens.get(token_id, "<image_soft_token>"),
        placeholder=begin,
        prefix=f"\n\n{begin}",
        suffix=f"{end}\n\n",
        unit=side // tokens_per_side,
        side=side,
        resample=files.resample(BILINEAR),
    )
