"""Files of images without what is not needed for their pixels.

Texts, profiles, thumbnails and further frames can be made to cost a decoder far more time or memory than the pixels.
None of them changes the pixels, so they are removed before Pillow sees the file. Of EXIF data the orientation counts.
"""

from proa.image.limits import ImageError

# Files have far fewer; each part costs Pillow microseconds of Python.
MAX_PARTS = 50_000
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_NEEDED = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}
MAX_JPEG_SEGMENTS = 1000  # before the first scan: EXIF data and profiles of many megabytes take 64 KiB each
MAX_JPEG_SCANS = 32  # each passes over all of a progressive image; encoders write 10, or 18 for CMYK
_JPEG_APP0, _JPEG_APP1, _JPEG_APP14, _JPEG_SCAN = 0xE0, 0xE1, 0xEE, 0xDA
_JPEG_BARE = {0x00, 0x01, *range(0xD0, 0xDA)}  # without a length and a body
_JPEG_UNNEEDED = _JPEG_BARE | {*range(0xE0, 0xF0), 0xFE}  # applications' data, comments
_FILL = b"\xff" * 1024


def strip_metadata(data: bytes) -> tuple[bytes, bytes]:
    """The file without the metadata, and its EXIF data. Files of formats not named here are returned as they are.
    Raises `ImageError`."""
    if data.startswith(_PNG):
        return _strip_png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _strip_jpeg(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _strip_gif(data), b""
    return data, b""


def _strip_png(data: bytes) -> tuple[bytes, bytes]:
    """Chunks: length of the body (4 bytes), name (4), body, checksum (4)."""
    view = memoryview(data)
    kept = [view[: len(_PNG)]]
    exif = b""
    start, num_parts = len(_PNG), 0
    while start < len(data):
        name, end = data[start + 4 : start + 8], start + 12 + int.from_bytes(data[start : start + 4], "big")
        if name in _PNG_NEEDED:
            kept.append(view[start:end])
        elif name == b"eXIf":
            exif = data[start + 8 : end - 4]
        start = end
        num_parts = _count(num_parts, MAX_PARTS)
    return b"".join(kept), exif


def _strip_jpeg(data: bytes) -> tuple[bytes, bytes]:
    """Segments up to the first scan: 0xff, kind, length of itself and the body (2 bytes), body. What is between
    segments is skipped, as decoders do."""
    view = memoryview(data)
    kept = [view[:2]]
    exif = []
    num_parts = 0
    start = _find_segment(data, 2)
    while (kind := data[start + 1]) != _JPEG_SCAN:
        end = start + 2 if kind in _JPEG_BARE else start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
        if kind == _JPEG_APP1 and data.startswith(b"Exif\0\0", start + 4):
            exif.append(data[start + 10 : end])
        if kind in (_JPEG_APP0, _JPEG_APP14) or kind not in _JPEG_UNNEEDED:
            kept.append(view[start:end])
        start = _find_segment(data, end)
        num_parts = _count(num_parts, MAX_JPEG_SEGMENTS)
    if data.count(b"\xff\xda", start) > MAX_JPEG_SCANS:
        raise ImageError(f"the image is a JPEG file with more than {MAX_JPEG_SCANS} scans")
    kept.append(view[start:])
    return b"".join(kept), b"".join(exif)


def _find_segment(data: bytes, start: int) -> int:
    start = data.find(b"\xff", start)
    # Further bytes of 0xff may stand before the kind.
    while start != -1 and data.startswith(b"\xff", start + 1):
        start += 1 if not data.startswith(_FILL, start + 1) else len(_FILL)
    if start == -1 or start + 4 > len(data):
        raise ImageError("the image is a JPEG file that ends before its pixels")
    return start


def _strip_gif(data: bytes) -> bytes:
    """Up to the first frame's end; of the extensions before it, the last graphic control has its transparency."""
    start = 13 + _num_palette_bytes(data, 10)
    head = data[:start]
    control = b""
    num_parts = 0
    while data[start : start + 1] == b"!":
        begin = start
        start += 2
        num_parts = _count(num_parts, MAX_PARTS)
        while start < len(data) and (size := data[start]):
            start += 1 + size
            num_parts = _count(num_parts, MAX_PARTS)
        start += 1
        if data[begin + 1 : begin + 2] == b"\xf9":
            control = data[begin:start]
    return head + control + data[start:]


def _num_palette_bytes(data: bytes, flags_at: int) -> int:
    flags = int.from_bytes(data[flags_at : flags_at + 1], "big")
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _count(num_parts: int, limit: int) -> int:
    if num_parts == limit:
        raise ImageError(f"the image's file has more than {limit} parts")
    return num_parts + 1
