"""Pieces of JSON text, as they are written into a call's arguments."""

import json
import re

PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}  # and what they are in JSON
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


def escape(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def held_back(text: str, end: str) -> int:
    """Length of the longest tail of the text that may be the beginning of `end`, and is not all of it."""
    for length in range(min(len(end) - 1, len(text)), 0, -1):
        if end.startswith(text[-length:]):
            return length
    return 0
