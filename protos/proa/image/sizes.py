"""The size to which an image is resized. Does not know its pixels."""

import math

from proa.contract import ImageInput
from proa.image.error import ImageError

MAX_ASPECT_RATIO = 200  # as Qwen's


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
