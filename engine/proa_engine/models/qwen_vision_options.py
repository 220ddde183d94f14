"""Read the options of Qwen's image encoder from `vision_config` and from the image processor's fields.

Raises ValueError, naming the field, for what is not supported.
"""

from collections.abc import Sequence
from typing import Any

from proa.contract import ImageInput
from proa_engine.models.fields import Fields, require
from proa_engine.models.image_files import ImageFiles
from proa_engine.models.qwen_vision import QwenVisionOptions

IMAGE_TOKEN = "<|image_pad|>"
# Where a folder has no file of an image processor: those of `transformers`.
MIN_PIXELS = 56 * 56
MAX_PIXELS = 28 * 28 * 1280
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3


def read_qwen_vision(fields: Fields, files: ImageFiles, deepstack: Sequence[int]) -> QwenVisionOptions:
    """`deepstack`: `deepstack_visual_indexes` where `vision_config` has none."""
    vision, processor = fields["vision_config"], files.processor
    require(vision, "hidden_act", ("gelu_pytorch_tanh",))
    require(vision, "in_channels", (3,))
    rope = vision.get("rope_parameters") or {}
    require(rope, "rope_type", ("axial", "default"))
    patch_size, merge, frames = _size(vision, "patch_size", 16), vision.get("spatial_merge_size", 2), _frames(vision)
    require(processor, "patch_size", (patch_size,))
    require(processor, "merge_size", (merge,))
    require(processor, "temporal_patch_size", (frames,))
    output_size = vision.get("out_hidden_size", 3584)
    require({"out_hidden_size": output_size}, "out_hidden_size", (fields["hidden_size"],))
    hidden_size, num_heads = vision.get("hidden_size", 1152), vision.get("num_heads", 16)
    if hidden_size % (4 * num_heads):
        raise ValueError(f"vision_config.hidden_size {hidden_size} is not a multiple of 4 x {num_heads} heads")
    positions = vision.get("num_position_embeddings", 2304)
    return QwenVisionOptions(
        input=_image_input(fields, files, unit=patch_size * merge),
        scaling=files.pixel_scaling(CLIP_MEAN, CLIP_STD),
        depth=vision.get("depth", 27),
        hidden_size=hidden_size,
        inner_size=vision.get("intermediate_size", 4304),
        num_heads=num_heads,
        output_size=output_size,
        patch_size=patch_size,
        frames=frames,
        merge=merge,
        grid=int(positions**0.5),
        rope_theta=rope.get("rope_theta", 10_000.0),
        deepstack=tuple(vision.get("deepstack_visual_indexes", deepstack)),
    )


def _image_input(fields: Fields, files: ImageFiles, unit: int) -> ImageInput:
    processor: Fields = files.processor
    size: dict[str, Any] = processor.get("size") or {}
    token_id = fields["image_token_id"]
    token = files.tokens.get(token_id, IMAGE_TOKEN)
    resample = processor.get("resample")
    return ImageInput(
        token_id=token_id,
        token=token,
        placeholder=token,
        unit=unit,
        min_pixels=processor.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS,
        max_pixels=processor.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS,
        resample=BICUBIC if resample is None else resample,
    )


def _size(vision: Fields, name: str, default: int) -> int:
    """A field that may also be the same number twice."""
    value = vision.get(name, default)
    first: int = value[0] if isinstance(value, list) else value
    require({name: value}, name, (first, [first, first]))
    return first


def _frames(vision: Fields) -> int:
    value = vision.get("temporal_patch_size", 2)
    frames: int = value[0] if isinstance(value, list) else value
    return frames
