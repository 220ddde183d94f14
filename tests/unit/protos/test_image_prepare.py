"""Files of images become the pixels that Pillow shows, resized."""

import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from proa.image.decode import to_rgb
from proa.image.limits import ImageError, ImageLimits, hash_image
from proa.image.prepare import prepare_image, prepare_pillow
from support.image_files import KEEPS_SHAPE, SQUARE, encoded, random_image

LIMITS = ImageLimits()


def shown(data: bytes, height: int, width: int) -> bytes:
    """The pixels by Pillow's own means, of the file as it is."""
    image = to_rgb(ImageOps.exif_transpose(Image.open(BytesIO(data))))
    return image.resize((width, height), Image.Resampling(KEEPS_SHAPE.resample)).tobytes()


def with_orientation(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    exif[0x010E] = "a description"
    return exif


@pytest.mark.parametrize(
    ("format", "mode", "options"),
    [
        ("PNG", "1", {}),
        ("PNG", "I;16", {}),
        ("PNG", "P", {"transparency": bytes(range(0, 256, 4))}),
        ("PNG", "RGB", {"exif": with_orientation(5), "dpi": (300, 300)}),
        ("JPEG", "RGB", {"exif": with_orientation(6), "comment": "a comment", "icc_profile": bytes(200_000)}),
        ("JPEG", "RGB", {"exif": with_orientation(8), "progressive": True}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "L", {}),
        ("WEBP", "RGBA", {"exif": with_orientation(7)}),
        ("GIF", "P", {"transparency": 3, "comment": "a comment" * 100}),
        ("BMP", "RGB", {}),
    ],
)
def test_a_file_has_the_pixels_that_pillow_shows(format: str, mode: str, options: dict[str, Any]) -> None:
    data = encoded(random_image(mode, 97, 181), format, **options)
    image = prepare_image(data, KEEPS_SHAPE, LIMITS)
    assert image.pixels == shown(data, image.height, image.width)
    assert image.num_tokens == image.height * image.width // 32**2
    assert image.hash == hash_image(image.pixels, image.height, image.width)


@pytest.mark.parametrize("number", range(10))
def test_an_image_is_turned_as_its_orientation_says(number: int) -> None:
    data = encoded(random_image("RGB", 64, 128), "PNG", exif=with_orientation(number))
    image = prepare_image(data, KEEPS_SHAPE, LIMITS)
    assert (image.height, image.width) == ((64, 128) if 5 <= number <= 8 else (128, 64))
    assert image.pixels == shown(data, image.height, image.width)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animated_image_is_taken(format: str) -> None:
    frames = [random_image("L", 64, 64, seed) for seed in range(3)]
    options = {} if format != "WEBP" else {"lossless": True}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    image = prepare_image(data, KEEPS_SHAPE, LIMITS)
    assert image.pixels == frames[0].convert("RGB").tobytes()


def test_a_transparent_image_is_put_on_white() -> None:
    image = random_image("RGBA", 1500, 1500)
    white = Image.new("RGBA", image.size, "white")
    assert to_rgb(image).tobytes() == Image.alpha_composite(white, image).convert("RGB").tobytes()


def test_a_pillow_image_is_prepared_as_its_file() -> None:
    data = encoded(random_image("RGB", 97, 181), "JPEG", exif=with_orientation(6))
    assert prepare_pillow(Image.open(BytesIO(data)), SQUARE) == prepare_image(data, SQUARE, LIMITS)


def test_the_smallest_image_grows() -> None:
    image = prepare_image(encoded(Image.new("RGB", (1, 1), "red"), "PNG"), KEEPS_SHAPE, LIMITS)
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(64, 64, 3)
    assert (pixels == (255, 0, 0)).all()


def test_an_image_over_a_limit_is_refused() -> None:
    data = encoded(random_image("RGB", 20, 30), "PNG")
    prepare_image(data, KEEPS_SHAPE, ImageLimits(max_bytes=len(data), max_pixels=600))
    with pytest.raises(ImageError, match="20 x 30 = 600 pixels, the limit is 599"):
        prepare_image(data, KEEPS_SHAPE, ImageLimits(max_pixels=599))
    with pytest.raises(ImageError, match=f"{len(data)} bytes, the limit is {len(data) - 1}"):
        prepare_image(data, KEEPS_SHAPE, ImageLimits(max_bytes=len(data) - 1))


@pytest.mark.parametrize("extra", [b"\xff" * 5000, b"junk", b"\xff\x00", b"\xff\xd0"])
def test_bytes_between_the_segments_of_a_jpeg_file_are_skipped(extra: bytes) -> None:
    data = encoded(random_image("RGB", 64, 64), "JPEG")
    assert prepare_image(data[:20] + extra + data[20:], KEEPS_SHAPE, LIMITS) == prepare_image(data, KEEPS_SHAPE, LIMITS)


def test_an_orientation_of_four_bytes_counts() -> None:
    exif = b"MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHLLL", 0x0112, 4, 1, 6, 0)
    data = encoded(random_image("RGB", 64, 128), "PNG", exif=exif)
    image = prepare_image(data, KEEPS_SHAPE, LIMITS)
    assert (image.height, image.width) == (64, 128)
    assert image.pixels == shown(data, image.height, image.width)
