"""Images are resized to the pixels of `transformers`, bit for bit."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from proa.image.limits import ImageLimits
from proa.image.prepare import prepare_image
from support.image_files import FILLED, KEEPS_SHAPE, LONGEST_SIDE, SQUARE, encoded, random_image

FILES: list[tuple[str, str, dict[str, Any]]] = [
    ("PNG", "1", {}),
    ("PNG", "L", {}),
    ("PNG", "LA", {}),
    ("PNG", "I;16", {}),
    ("PNG", "P", {}),
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    ("PNG", "RGBA", {}),
    ("JPEG", "L", {}),
    ("JPEG", "RGB", {}),
    ("JPEG", "CMYK", {}),
    ("WEBP", "RGBA", {}),
    ("GIF", "P", {"save_all": True, "append_images": [random_image("P", 211, 97, 1)]}),
    ("JPEG", "RGB", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"}),
    ("BMP", "RGB", {}),
]


def opened(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(BytesIO(data)))


def pixels_of_qwen(image: Image.Image) -> np.ndarray:
    """uint8 [height, width, 3], put together from the patches."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        size={"shortest_edge": KEEPS_SHAPE.min_pixels, "longest_edge": KEEPS_SHAPE.max_pixels},
        do_rescale=False,
        do_normalize=False,
    )
    features = processor(images=[image])
    rows, columns = features["image_grid_thw"][0][1:]
    # [block row, block column, row, column, channel, time, y, x]
    patches = features["pixel_values"].reshape(rows // 2, columns // 2, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]
    pixels: np.ndarray = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 16, columns * 16, 3).astype(np.uint8)
    return pixels


def pixels_of_gemma(image: Image.Image) -> np.ndarray:
    side = {"height": SQUARE.side, "width": SQUARE.side}
    features = Gemma3ImageProcessorPil(size=side, do_rescale=False, do_normalize=False)(images=[image])
    pixels: np.ndarray = np.asarray(features["pixel_values"][0]).transpose(1, 2, 0).astype(np.uint8)
    return pixels


def pixels_of_pixtral(image: Image.Image) -> np.ndarray:
    processor = PixtralImageProcessorPil(
        size={"longest_edge": LONGEST_SIDE.max_side}, patch_size=LONGEST_SIDE.unit, do_rescale=False, do_normalize=False
    )
    pixels: np.ndarray = np.asarray(processor(images=[image])["pixel_values"][0]).transpose(1, 2, 0).astype(np.uint8)
    return pixels


def pixels_of_gemma4(image: Image.Image) -> np.ndarray:
    """Put together from the patches, behind which are those of padding."""
    processor = Gemma4ImageProcessorPil(max_soft_tokens=FILLED.max_tokens, do_rescale=False)
    features = processor(images=[image])
    columns, rows = features["image_position_ids"][0].max(0) + 1
    patches = features["pixel_values"][0][: rows * columns].reshape(rows, columns, 16, 16, 3)
    pixels: np.ndarray = patches.transpose(0, 2, 1, 3, 4).reshape(rows * 16, columns * 16, 3).astype(np.uint8)
    return pixels


@pytest.mark.parametrize(("format", "mode", "options"), FILES)
def test_pixels_are_those_of_transformers(format: str, mode: str, options: dict[str, Any]) -> None:
    data = encoded(random_image(mode, 211, 97), format, **options)
    kept = prepare_image(data, KEEPS_SHAPE, ImageLimits())
    np.testing.assert_array_equal(
        np.frombuffer(kept.pixels, np.uint8).reshape(kept.height, kept.width, 3), pixels_of_qwen(opened(data))
    )
    square = prepare_image(data, SQUARE, ImageLimits())
    assert square.pixels == pixels_of_gemma(opened(data)).tobytes()
    limited = prepare_image(data, LONGEST_SIDE, ImageLimits())
    assert limited.pixels == pixels_of_pixtral(opened(data)).tobytes()
    filled = prepare_image(data, FILLED, ImageLimits())
    assert filled.pixels == pixels_of_gemma4(opened(data)).tobytes()


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (33, 3), (255, 257), (1000, 7), (700, 699)])
def test_sizes_are_those_of_transformers(size: tuple[int, int]) -> None:
    data = encoded(random_image("L", *size), "PNG")
    image = prepare_image(data, KEEPS_SHAPE, ImageLimits())
    assert image.pixels == pixels_of_qwen(opened(data)).tobytes()
    limited = prepare_image(data, LONGEST_SIDE, ImageLimits())
    assert limited.pixels == pixels_of_pixtral(opened(data)).tobytes()
    filled = prepare_image(data, FILLED, ImageLimits())
    assert filled.pixels == pixels_of_gemma4(opened(data)).tobytes()
