"""How large an image may be, what it is resized to, and the hash that names it. Without Pillow: engines use it too."""

import hashlib
import math
import struct
from dataclasses import dataclass

from proa.contract import ImageInput
from proa.contract.request import HASH_BYTES

# Pillow allocates one value for each pixel of a row and for each of a column; other limits follow from JPEG's own.
MAX_SIDE = 65_535

MAX_ASPECT_RATIO = 200  # as Qwen's


class ImageError(ValueError):
    """Its text is a sentence without a full stop for the user who sent the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    max_bytes: int = 20 * 1024 * 1024  # as sent
    max_pixels: int = 50_000_000  # before resizing


def resized(height: int, width: int, input: ImageInput) -> tuple[int, int]:
    """Height and width in pixels, multiples of `unit`: `side`; or those of the image, whose longer side is first shrunk
    to `max_side`, rounded up; or those of its shape with `max_pixels`, rounded down (`fills`); or Qwen2-VL's "smart
    resize": the nearest to the image's shape within `min_pixels` and `max_pixels`. Raises `ImageError` for an image
    that is far too long."""
    if input.side:
        return input.side, input.side
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ImageError(
            f"the image is {width} x {height} pixels, its longer side may be at most {MAX_ASPECT_RATIO} times the other"
        )
    unit = input.unit
    if input.max_side:
        ratio = max(1.0, max(height, width) / input.max_side)
        height, width = (max(1, math.floor(size / ratio)) for size in (height, width))
        return -(-height // unit) * unit, -(-width // unit) * unit
    if input.fills:
        scale = math.sqrt(input.max_pixels / (height * width))
        rows, columns = (math.floor(scale * size / unit) for size in (height, width))
        if not rows or not columns:
            count = min(max(height, width) // min(height, width), input.max_tokens)
            rows, columns = (1, count) if width > height else (count, 1)
        return rows * unit, columns * unit
    # Python's `round` as in the reference: a half goes to the even number.
    rounded = round(height / unit) * unit, round(width / unit) * unit
    if rounded[0] * rounded[1] > input.max_pixels:
        scale = math.sqrt(height * width / input.max_pixels)
        return max(unit, math.floor(height / scale / unit) * unit), max(unit, math.floor(width / scale / unit) * unit)
    if rounded[0] * rounded[1] < input.min_pixels:
        scale = math.sqrt(input.min_pixels / (height * width))
        return math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return rounded


def hash_image(pixels: bytes, height: int, width: int) -> bytes:
    """`pixels` [height, width, 3] are those of the resized image."""
    digest = hashlib.sha256(struct.pack("<II", height, width))
    digest.update(pixels)
    return digest.digest()[:HASH_BYTES]
