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
    """Height and width in pixels: `side`, or Qwen2-VL's "smart resize": the multiples of `unit` that are nearest to the
    image's shape, within `min_pixels` and `max_pixels`. Raises `ImageError` for an image that is far too long."""
    if input.side:
        return input.side, input.side
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ImageError(
            f"the image is {width} x {height} pixels, its longer side may be at most {MAX_ASPECT_RATIO} times the other"
        )
    unit = input.unit
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
