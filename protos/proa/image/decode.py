"""Opening files of images with Pillow, within limits, and converting what they hold to RGB."""

import struct
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from proa.image.containers import strip_metadata
from proa.image.limits import MAX_SIDE, ImageError, ImageLimits

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

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_STRIP = 1 << 20  # pixels that are put on white at a time


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


def open_image(data: bytes, limits: ImageLimits) -> tuple[Image.Image, Orientation]:
    """Reads the header alone. Raises `ImageError`, and what Pillow raises for damaged files."""
    if not data:
        raise ImageError("the image is empty, it has no bytes")
    if len(data) > limits.max_bytes:
        raise ImageError(f"the image has {len(data)} bytes, the limit is {limits.max_bytes}")
    stripped, exif = strip_metadata(data)
    try:
        image = Image.open(BytesIO(stripped), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError(f"the image is not a file of the formats {', '.join(FORMATS)}, or it is damaged") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"the image has too many pixels, the limit is {limits.max_pixels}") from None
    if any(tile.codec_name == "bmp_rle" for tile in image.tile):  # Pillow decodes it in Python: seconds for a few MB
        raise ImageError("the image is a BMP file with run-length encoding, which is not supported")
    return image, read_orientation(exif or image.info.get("exif", b""))


def check_size(image: Image.Image, limits: ImageLimits) -> None:
    """Raises `ImageError`."""
    if image.width * image.height > limits.max_pixels:
        raise ImageError(
            f"the image has {image.width} x {image.height} = {image.width * image.height} pixels, "
            f"the limit is {limits.max_pixels}"
        )
    if max(image.size) > MAX_SIDE:
        raise ImageError(f"the image has {image.width} x {image.height} pixels, the limit of a side is {MAX_SIDE}")


def to_rgb(image: Image.Image) -> Image.Image:
    """On white where it is transparent, as `transformers` and browsers show it."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    # In strips, so that three copies of the whole image are never in memory.
    rgb = Image.new("RGB", image.size)
    rows = max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        rgb.paste(Image.alpha_composite(white, strip), (0, top))
    return rgb
