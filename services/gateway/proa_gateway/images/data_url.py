"""The bytes of a data URL (RFC 2397)."""

from binascii import Error, a2b_base64
from urllib.parse import unquote

from proa.image.error import ImageError

_URL_SAFE = str.maketrans("-_", "+/")


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def read_data_url(url: str, max_bytes: int) -> bytes:
    """The media type is not read: what the file is decides. Raises `ImageError`."""
    header, comma, text = url[5:].partition(",")
    if not comma or header.rpartition(";")[2].strip().lower() != "base64":
        raise ImageError("the data URL is not of the form data:image/png;base64,…")
    if (num_bytes := len(text) // 4 * 3 - 2) > max_bytes:
        raise ImageError(f"the image has about {num_bytes} bytes, the limit is {max_bytes}")
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError:  # Error, or a character that is not ASCII
        return _read_lenient(text)


def _read_lenient(text: str) -> bytes:
    """As clients also send it: with line breaks, escapes, of the URL-safe alphabet, or without padding."""
    plain = "".join(unquote(text).split()).translate(_URL_SAFE).rstrip("=")
    try:
        return a2b_base64(plain + "=" * (-len(plain) % 4), strict_mode=True)
    except (Error, ValueError):
        raise ImageError("the data URL's base64 is damaged") from None
