"""The orientation in a file's EXIF data: the only part of it that changes what a viewer shows."""

import struct
from dataclasses import dataclass

from PIL import Image

_TAG = 0x0112
_KINDS = {3: "H", 4: "L"}
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class Orientation:
    """EXIF's number, 1 to 8; others mean 1: the pixels are as they are shown."""

    number: int = 1

    def turned(self, height: int, width: int) -> tuple[int, int]:
        """The size of the upright image."""
        return (width, height) if 5 <= self.number <= 8 else (height, width)

    def apply(self, image: Image.Image) -> Image.Image:
        transposition = _TRANSPOSITIONS.get(self.number)
        return image if transposition is None else image.transpose(transposition)


def read_orientation(exif: bytes) -> Orientation:
    """`exif` is a TIFF header with its first directory, perhaps behind "Exif". Pillow would read all its tags, which
    may lie about their sizes; damaged data means upright."""
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return Orientation()
    try:
        (start,) = struct.unpack_from(order + "L", exif, 4)
        (num_tags,) = struct.unpack_from(order + "H", exif, start)
        for offset in range(start + 2, start + 2 + 12 * num_tags, 12):
            tag, kind, count = struct.unpack_from(order + "HHL", exif, offset)
            if tag == _TAG and kind in _KINDS and count == 1:
                return Orientation(*struct.unpack_from(order + _KINDS[kind], exif, offset + 8))
    except struct.error:  # ends before the tag
        pass
    return Orientation()
