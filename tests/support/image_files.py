"""Files of images with random pixels, and how models read them."""

import base64
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from proa.contract import ImageInput

# As Qwen3-VL, Mistral 3, Gemma 4 and Gemma 3 read images, with smaller limits.
KEEPS_SHAPE = ImageInput(
    token_id=5,
    token="<image>",
    placeholder="<image>",
    unit=32,
    min_pixels=64 * 64,
    max_pixels=256 * 256,
    resample=Image.Resampling.BICUBIC,
)
LONGEST_SIDE = replace(KEEPS_SHAPE, min_pixels=0, max_pixels=0, max_side=200, unit=28)
FILLED = replace(KEEPS_SHAPE, min_pixels=0, max_pixels=70 * 48**2, unit=48, fills=True)
SQUARE = ImageInput(
    token_id=5,
    token="<soft>",
    placeholder="<start>",
    prefix="\n\n<start>",
    suffix="<end>\n\n",
    unit=56,
    side=224,
    resample=Image.Resampling.BILINEAR,
)


def random_image(mode: str, width: int, height: int, seed: int = 0) -> Image.Image:
    generator = np.random.default_rng(seed)
    if mode == "1":
        return Image.fromarray(generator.random((height, width)) > 0.5)
    if mode == "I;16":
        return Image.fromarray(generator.integers(0, 65536, (height, width), dtype=np.uint16))
    if mode == "P":
        return random_image("RGB", width, height, seed).quantize(64)
    size = width * height * len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, (width, height), generator.bytes(size))


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def random_areas(seed: int, width: int = 100, height: int = 60) -> Image.Image:
    """Areas of random colours, which tiny models tell apart."""
    return random_image("RGB", 3, 2, seed).resize((width, height))


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(image, "PNG")).decode()
