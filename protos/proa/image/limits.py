"""ImageLimits: how large an image may be."""

from dataclasses import dataclass

# Pillow allocates one value for each pixel of a row and for each of a column; other limits follow from JPEG's own.
MAX_SIDE = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    max_bytes: int = 20 * 1024 * 1024  # as sent
    max_pixels: int = 50_000_000  # before resizing
