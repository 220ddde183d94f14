"""The hash that names an image. Without Pillow: engines compute it too."""

import hashlib
import struct

from proa.contract.image import HASH_BYTES


def hash_image(pixels: bytes, height: int, width: int) -> bytes:
    """`pixels` [height, width, 3] are those of the resized image."""
    digest = hashlib.sha256(struct.pack("<II", height, width))
    digest.update(pixels)
    return digest.digest()[:HASH_BYTES]
