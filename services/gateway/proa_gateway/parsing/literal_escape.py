"""Escapes of Python's and JSON's strings, as JSON writes them."""

import re
import sys

from proa_gateway.parsing.json_text import escape

_ESCAPES = {
    **{letter: f"\\{letter}" for letter in '"\\bfnrt'},
    **{"'": "'", "/": "/", "\n": "", "0": "\\u0000", "a": "\\u0007", "v": "\\u000b"},
}
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits after the letter
_HEXADECIMAL = re.compile("[0-9a-fA-F]*")


def read_escape(text: str) -> tuple[str, int] | None:
    """What the escape at the text's start is in JSON, and its length. None: more text is needed.

    A backslash with nothing that it could stand for is itself.
    """
    letter = text[1:2]
    if not letter:
        return None
    if (num_digits := _CODES.get(letter)) is None:
        return _ESCAPES.get(letter, "\\\\"), 2 if letter in _ESCAPES else 1
    digits = text[2 : 2 + num_digits]
    if not _HEXADECIMAL.fullmatch(digits):
        return "\\\\", 1
    if len(digits) < num_digits:
        return None
    code = int(digits, 16)
    if code > sys.maxunicode:
        return "\\\\", 1
    # Two escapes may be the halves of one character, which JSON writes the same.
    return f"\\u{code:04x}" if code <= 0xFFFF else escape(chr(code)), 2 + num_digits
