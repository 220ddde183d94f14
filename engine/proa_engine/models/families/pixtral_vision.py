"""The image encoder of Mistral 3: Pixtral's vision transformer (Agrawal et al., 2024, arXiv 2410.07073) over patches,
whose outputs are merged by squares and projected to the decoder's width."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from proa.contract import ImageInput
from proa_engine.layers.norm import NormOptions
from proa_engine.layers.vision import (
    CLIP_MEAN,
    CLIP_STD,
    AxialRotation,
    Dense,
    GatedFeedForward,
    PatchEmbedding,
    PixelScaling,
    RowFunction,
    attend,
    frequencies,
    rotate,
)
from proa_engine.layers.weights import Slice, Weights
from proa_engine.models.decoder import tensors_of, text_weights
from proa_engine.models.fields import Fields, norm, require
from proa_engine.models.image_config import ImageConfig
from proa_engine.models.image_files import ImageFiles

NORM = NormOptions(1e-5)
ACTIVATIONS: dict[str, RowFunction] = {"silu": F.silu, "gelu": F.gelu}
# As the library's processor names them, and the id in Mistral's own tokenizers, for folders without `tokenizer.json`.
IMAGE_TOKEN, ROW_END, IMAGE_END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
ROW_END_ID = 12
# Where a folder has no file of an image processor: those of `transformers`.
LONGEST_EDGE = 1024
BICUBIC = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralVisionOptions:
    input: ImageInput
    scaling: PixelScaling
    depth: int
    hidden_size: int
    inner_size: int
    activation: str
    num_heads: int
    output_size: int  # the decoder's width
    vocab_size: int  # the decoder's
    patch_size: int  # pixels
    rope_theta: float
    projector_norm: NormOptions
    projector_bias: bool
    weights_name: tuple[str, ...] = ("vision_tower.", "model.vision_tower.")

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
        )

    def make(self, weights: Weights) -> "PixtralVisionEncoder":
        return PixtralVisionEncoder(weights, self)

    def _num_parameters(self) -> int:
        """Number of values in the encoder's matrices."""
        block = self.hidden_size * (4 * self.hidden_size + 3 * self.inner_size)
        projector = self.hidden_size * (self.hidden_size * self.merge**2 + self.output_size) + self.output_size**2
        return 3 * self.patch_size**2 * self.hidden_size + self.depth * block + projector


class PixtralVisionEncoder:
    """An `ImageEncoder`. The tokens that end rows have their own embeddings, so that an image's are one piece.

    Patches are in the order of tokens, row by row within each token's square.
    """

    def __init__(self, weights: Weights, options: PixtralVisionOptions) -> None:
        """`weights` are those of the whole checkpoint."""
        self.options = options
        size, patch = options.hidden_size, options.patch_size
        outer = weights / "model" if weights.has("model.multi_modal_projector.norm.weight") else weights
        tower, projector = outer / "vision_tower", outer / "multi_modal_projector"
        kernel = (tower / "patch_conv").take("weight", (size, 3, patch, patch), dtype=torch.float32)
        self.patches = PatchEmbedding(kernel, None, options.scaling, merge=options.merge)
        self.norm = NORM.make(tower / "ln_pre", size)
        turns = frequencies(options.rope_theta, size // options.num_heads // 2, weights.source.device)
        self.rotation = AxialRotation(turns[::2], turns[1::2], merge=options.merge)
        layers = tower / "transformer" / "layers"
        self.blocks = [PixtralVisionBlock(layers / str(number), options) for number in range(options.depth)]
        self.projector_norm = options.projector_norm.make(projector / "norm", size)
        merging, bias = projector / "patch_merger" / "merging_layer", options.projector_bias
        self.merging = Dense(merging, size * options.merge**2, size, bias=False)
        self.first = Dense(projector / "linear_1", size, options.output_size, bias=bias)
        self.second = Dense(projector / "linear_2", options.output_size, options.output_size, bias=bias)
        shape, row = (options.vocab_size, options.output_size), Slice(0, options.input.row_end_id, 1)
        self.row_end = (text_weights(weights)[0] / "embed_tokens").take("weight", shape, row).flatten()

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [height, width, 3] uint8 -> [tokens, output_size]"""
        rows, columns = (size // self.options.patch_size for size in pixels.shape[:2])
        x = self.norm(self.patches(pixels).to(self.row_end.dtype))
        cos, sin = self.rotation(rows, columns)
        for block in self.blocks:
            x = block(x, cos, sin)
        merge = self.options.merge
        squares = self.projector_norm(x).view(-1, merge**2, x.shape[1])
        x = self.merging(squares.transpose(1, 2).flatten(1))  # all patches of a channel beside each other
        x = self.second(F.gelu(self.first(x))).view(rows // merge, columns // merge, -1)
        ends = self.row_end.expand(rows // merge, 1, -1)
        return torch.cat((x, ends), dim=1).flatten(0, 1)[:-1]

    def parameters(self) -> Iterator[torch.Tensor]:
        return tensors_of(self)


class PixtralVisionBlock:
    def __init__(self, weights: Weights, options: PixtralVisionOptions) -> None:
        size, attention = options.hidden_size, weights / "attention"
        self.num_heads = options.num_heads
        self.norm1, self.norm2 = NORM.make(weights / "attention_norm", size), NORM.make(weights / "ffn_norm", size)
        self.inputs = [Dense(attention / name, size, size, bias=False) for name in ("q_proj", "k_proj", "v_proj")]
        self.output = Dense(attention / "o_proj", size, size, bias=False)
        activation, dense = ACTIVATIONS[options.activation], partial(Dense, bias=False)
        self.mlp = GatedFeedForward(weights / "feed_forward", size, options.inner_size, activation, dense)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [patches, hidden_size] -> the same shape"""
        normed = self.norm1(x)
        q, k, v = (project(normed).unflatten(1, (self.num_heads, -1)) for project in self.inputs)
        x = x + self.output(attend(rotate(q, cos, sin), rotate(k, cos, sin), v))
        return x + self.mlp(self.norm2(x))


def read_pixtral_vision(fields: Fields, files: ImageFiles) -> PixtralVisionOptions:
    vision, processor = fields["vision_config"], files.processor
    require(vision, "model_type", ("pixtral",))
    require(vision, "num_channels", (3,))
    require(fields, "vision_feature_layer", (-1, [-1]))
    require(fields, "projector_hidden_act", ("gelu",))
    activation = vision.get("hidden_act", "gelu")
    require({"hidden_act": activation}, "hidden_act", tuple(ACTIVATIONS))
    rope = vision.get("rope_parameters") or {}
    require(rope, "rope_type", ("axial", "default"))
    hidden_size, num_heads = vision.get("hidden_size", 1024), vision.get("num_attention_heads", 16)
    if hidden_size % (4 * num_heads):
        raise ValueError(f"vision_config.hidden_size {hidden_size} is not a multiple of 4 x {num_heads} heads")
    patch_size = vision.get("patch_size", 16)
    require(processor, "patch_size", (patch_size, {"height": patch_size, "width": patch_size}))
    return PixtralVisionOptions(
        input=_image_input(fields, files, unit=patch_size * fields.get("spatial_merge_size", 2)),
        scaling=files.pixel_scaling(CLIP_MEAN, CLIP_STD),
        depth=vision.get("num_hidden_layers", 24),
        hidden_size=hidden_size,
        inner_size=vision.get("intermediate_size", 4096),
        activation=activation,
        num_heads=num_heads,
        output_size=fields["hidden_size"],
        vocab_size=fields["vocab_size"],
        patch_size=patch_size,
        rope_theta=rope.get("rope_theta") or vision.get("rope_theta", 10_000.0),
        projector_norm=norm(fields),
        projector_bias=fields.get("multimodal_projector_bias", False),
    )


def _image_input(fields: Fields, files: ImageFiles, unit: int) -> ImageInput:
    token_id, processor = fields["image_token_index"], files.processor
    known = {text: number for number, text in files.tokens.items()}
    if known and ROW_END not in known:
        raise ValueError(f"the tokenizer has no token {ROW_END}, which ends the rows of an image")
    token = files.tokens.get(token_id, IMAGE_TOKEN)
    size = processor.get("size") or {"longest_edge": LONGEST_EDGE}
    if "longest_edge" not in size:
        raise ValueError(f"size {size} of the image processor is not supported; supported: longest_edge")
    return ImageInput(
        token_id=token_id,
        token=token,
        placeholder=token,
        suffix=IMAGE_END,
        row_end_id=known.get(ROW_END, ROW_END_ID),
        row_end=ROW_END,
        unit=unit,
        max_side=size["longest_edge"],
        resample=files.resample(BICUBIC),
    )
