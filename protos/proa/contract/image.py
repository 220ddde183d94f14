"""Images of a prompt, and how a model reads them."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

HASH_BYTES: Final = 16
"""Of an image's hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of a prompt, resized as the model's `ImageInput` says. Until it has a place, `offset` is 0."""

    hash: bytes  # `proa.image.hash_image`
    offset: int = 0  # prompt tokens before its first one
    num_tokens: int
    height: int  # pixels
    width: int
    # uint8 RGB, row by row; empty: the engine has kept those of this hash
    pixels: bytes = field(default=b"", repr=False)

    @property
    def end(self) -> int:
        """The number of prompt tokens up to its last one."""
        return self.offset + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """How a model reads images: to which size they are resized, and how they stand in a prompt."""

    token_id: int  # stands in the prompt once for each square of `unit` pixels
    token: str  # its text
    placeholder: str  # what the chat template writes for an image; `prefix`, tokens and `suffix` replace it
    prefix: str = ""
    suffix: str = ""
    unit: int  # pixels; heights and widths are multiples of it
    side: int = 0  # height and width of every image; 0: images keep their shape, within the two limits
    min_pixels: int = 0
    max_pixels: int = 0
    resample: int  # Pillow's number of the filter

    @property
    def max_tokens(self) -> int:
        """Of the largest image."""
        return (self.side**2 or self.max_pixels) // self.unit**2

    def num_tokens(self, height: int, width: int) -> int:
        """Of an image of this size in pixels."""
        return (height // self.unit) * (width // self.unit)


def image_keys(images: Sequence[Image], start: int, end: int) -> tuple[bytes, ...]:
    """What the hash of the block of tokens start … end - 1 has behind the other extra keys: for each image that the
    block touches its hash, then its offset from `start` as little-endian int32."""
    return tuple(
        image.hash + struct.pack("<i", image.offset - start)
        for image in images
        if image.offset < end and image.end > start
    )
