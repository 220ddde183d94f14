"""Files of images that cost a careless decoder far more time or memory than their size."""

import struct
import zlib
from collections.abc import Callable

from PIL import Image

from support.image_files import encoded

PNG = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by PNG's kind of color
_FRAME = b"!\xf9\x04\0\0\0\0\0," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
_EXIF = b"II*\0\x08\0\0\0"


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, *, color: int = 2, depth: int = 8, extra: bytes = b"", pixels: bytes = b"") -> bytes:
    """`extra`: chunks before the pixels; `pixels`: chunks instead of black ones."""
    if not pixels:
        row = bytes(1 + (width * _CHANNELS[color] * depth + 7) // 8)
        packer = zlib.compressobj(9)
        pixels = png_chunk(b"IDAT", b"".join(packer.compress(row) for _ in range(height)) + packer.flush())
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return PNG + header + extra + pixels + png_chunk(b"IEND", b"")


def jpeg_segment(kind: int, body: bytes) -> bytes:
    return bytes([0xFF, kind]) + struct.pack(">H", len(body) + 2) + body


def jpeg(width: int, height: int, *, extra: bytes = b"", num_scans: int = 0, mode: str = "RGB") -> bytes:
    """`extra`: segments before the others; `num_scans`: more copies of the last scan of a progressive file."""
    data = encoded(Image.new(mode, (width, height)), "JPEG", progressive=num_scans > 0, subsampling=0)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:2] + extra + data[2:-2] + last_scan * num_scans + data[-2:]


def gif(width: int, height: int, *, extra: bytes = b"", frame: bytes = _FRAME) -> bytes:
    """`extra`: blocks before the frames."""
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + extra + frame + b";"


def gif_frame_at(left: int, top: int, width: int, height: int) -> bytes:
    return b"," + struct.pack("<HHHHB", left, top, width, height, 0) + b"\x02\x02\x44\x01\0"


def animated_webp(width: int, height: int, num_frames: int) -> bytes:
    """Frames of 16 x 16 pixels."""
    frame = bytes(6) + (15).to_bytes(3, "little") * 2 + bytes(4)
    frame += encoded(Image.new("RGB", (16, 16)), "WEBP", lossless=True)[12:]
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X\x0a\0\0\0\x02\0\0\0" + size + b"ANIM\x06\0\0\0" + bytes(6)
    body += (b"ANMF" + struct.pack("<I", len(frame)) + frame) * num_frames
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp(width: int, height: int, *, compression: int = 0, bits: int = 24, pixels: bytes = b"") -> bytes:
    palette = bytes(1024 if bits == 8 else 0)
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 54 + len(palette)) + header + palette + pixels


def exif_with_overlapping_tags(num_tags: int, num_bytes: int) -> bytes:
    tags = b"".join(struct.pack("<HHLL", tag, 7, num_bytes, 8) for tag in range(num_tags))
    return _EXIF + struct.pack("<H", num_tags) + tags + bytes(num_bytes)


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _tiff() -> bytes:
    return encoded(Image.new("L", (8, 8)), "TIFF")


REFUSED: dict[str, Callable[[], bytes]] = {
    "no bytes": bytes,
    "one byte": lambda: b"\x89",
    "SVG": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "HTML": lambda: b"<!doctype html>" + b" " * 1_000_000,
    "PDF": lambda: b"%PDF-1.7\n",
    "EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "TIFF": _tiff,
    "PNG signature": lambda: PNG,
    "truncated PNG": lambda: _truncated(png(64, 64)),
    "truncated JPEG": lambda: _truncated(jpeg(64, 64)),
    "truncated GIF": lambda: _truncated(gif(64, 64)),
    "truncated WebP": lambda: _truncated(encoded(Image.new("RGB", (64, 64)), "WEBP")),
    "truncated BMP": lambda: _truncated(encoded(Image.new("RGB", (64, 64)), "BMP")),
    "PNG with a damaged checksum": lambda: png(64, 64).replace(b"IDAT", b"IDAT\0", 1),
    "PNG of 100 megapixels": lambda: png(10_000, 10_000, depth=1, color=0),
    "PNG of 2³¹ columns": lambda: png(2**31 - 1, 2**31 - 1, pixels=png_chunk(b"IDAT", b"")),
    "PNG of 70000 columns": lambda: png(70_000, 500, depth=1, color=0),
    "PNG of a column": lambda: png(1, 10_000),
    "PNG of many chunks": lambda: png(8, 8, extra=png_chunk(b"tEXt", b"") * 100_000),
    "JPEG of many segments": lambda: jpeg(8, 8, extra=jpeg_segment(0xFE, b"") * 100_000),
    "JPEG of many scans": lambda: jpeg(64, 64, num_scans=33),
    "GIF of 65535 x 65535": lambda: gif(65_535, 65_535),
    "GIF with a frame far outside": lambda: gif(1, 1, frame=gif_frame_at(60_000, 60_000, 5000, 5000)),
    "GIF of many comments": lambda: gif(1, 1, extra=b"!\xfe\0" * 100_000),
    "GIF of a long comment": lambda: gif(1, 1, extra=b"!\xfe" + b"\x01 " * 100_000 + b"\0"),
    "WebP of 16383 x 16383": lambda: animated_webp(16_383, 16_383, 1),
    "BMP of 2³¹ columns": lambda: bmp(2**31 - 1, 2**31 - 1),
    "BMP with run-length encoding": lambda: bmp(700, 700, compression=1, bits=8, pixels=b"\x01\x01" * 490_000),
}
ACCEPTED: dict[str, Callable[[], bytes]] = {
    "PNG of a pixel": lambda: png(1, 1),
    "PNG with compressed texts": lambda: png(
        8, 8, extra=png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(20_000_000))) * 20
    ),
    "PNG with a compressed profile": lambda: png(
        8, 8, extra=png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(20_000_000)))
    ),
    "PNG with overlapping EXIF tags": lambda: png(
        8, 8, extra=png_chunk(b"eXIf", exif_with_overlapping_tags(65_535, 5_000_000))
    ),
    "JPEG with overlapping EXIF tags": lambda: jpeg(
        8, 8, extra=jpeg_segment(0xE1, b"Exif\0\0" + exif_with_overlapping_tags(4000, 10_000)) * 100
    ),
    "GIF of many frames": lambda: gif(64, 64, frame=_FRAME * 100_000),
    "WebP of many frames": lambda: animated_webp(64, 64, 20_000),
}
# 49 megapixels, just within the default limit.
LARGEST: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: png(7000, 7000),
    "PNG, 16 bits, transparent": lambda: png(7000, 7000, color=6, depth=16),
    "PNG, 1 bit": lambda: png(7000, 7000, color=0, depth=1),
    "JPEG": lambda: jpeg(7000, 7000),
    "JPEG, CMYK": lambda: jpeg(7000, 7000, mode="CMYK"),
    "JPEG, 30 scans": lambda: jpeg(7000, 7000, num_scans=20),
    "GIF": lambda: gif(7000, 7000),
    "WebP": lambda: encoded(Image.new("RGB", (7000, 7000)), "WEBP", method=0, quality=1),
    "WebP, lossless, transparent": lambda: encoded(Image.new("RGBA", (7000, 7000)), "WEBP", method=0, lossless=True),
    "WebP, animated": lambda: animated_webp(7000, 7000, 2),
    "BMP": lambda: bmp(7000, 7000, pixels=bytes(147_000_000)),
}
