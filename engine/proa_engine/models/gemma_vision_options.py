"""Read the options of Gemma 3's image encoder from `vision_config` and from the image processor's fields.

Raises ValueError, naming the field, for what is not supported. Pan and scan, which adds parts of long images to a
prompt as further images, is refused where the processor's file turns it on.
"""

from math import isqrt

from proa.contract import ImageInput
from proa_engine.models.fields import Fields, require
from proa_engine.models.gemma_vision import GemmaVisionOptions
from proa_engine.models.image_files import ImageFiles

# Where a folder has no file of an image processor: those of `transformers`.
MEAN = STD = (0.5, 0.5, 0.5)
BILINEAR = 2


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
    resample = processor.get("resample")
    return ImageInput(
        token_id=token_id,
        token=files.tokens.get(token_id, "<image_soft_token>"),
        placeholder=begin,
        prefix=f"\n\n{begin}",
        suffix=f"{end}\n\n",
        unit=side // tokens_per_side,
        side=side,
        resample=BILINEAR if resample is None else resample,
    )
