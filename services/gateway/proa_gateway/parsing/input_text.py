"""InputText: the input of a custom tool's call, from the JSON text of its arguments `{"input": "…"}` as it comes."""

import json
import re

from proa_gateway.parsing.format import INPUT

_BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MAX_BEGINNING = 64  # characters; what is longer has another form
_UNIT = re.compile(r'[^"\\]+|"|\\u[0-9a-fA-F]{4}|\\[^u]', re.DOTALL)
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")  # the first half of a surrogate pair
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_OPEN_ESCAPE = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}
_NO_CHARACTER = "\ufffd"  # in place of half a surrogate pair, which no response can have


class InputText:
    """A model that no grammar constrains may write other arguments. They are held until they have ended: an object with
    an `input` gives it, as JSON if it is no text; no arguments are no input; all else is the input itself.
    """

    __slots__ = ("_has_begun", "_has_ended", "_held", "_pending")

    def __init__(self) -> None:
        self._held: list[str] = []  # before the input has begun
        self._pending = ""  # of the input, not decoded yet
        self._has_begun = False  # its opening quote has come
        self._has_ended = False  # its closing quote has come

    def feed(self, arguments: str) -> str:
        """Read more of the arguments. Returns the text of the input that is certain now: whole characters."""
        if self._has_ended:
            return ""
        if self._has_begun:
            self._pending += arguments
            return self._read(is_last=False)
        may_begin = sum(map(len, self._held[:_MAX_BEGINNING])) < _MAX_BEGINNING
        self._held.append(arguments)
        if not may_begin or (found := _BEGINNING.match(text := "".join(self._held))) is None:
            return ""
        self._has_begun = True
        self._pending = text[found.end() :]
        return self._read(is_last=False)

    def close(self) -> str:
        """The arguments have ended. Returns the rest of the input. An escape that has not ended is left out."""
        return self._read(is_last=True) if self._has_begun else _other("".join(self._held))

    def _read(self, *, is_last: bool) -> str:
        text, position, written = self._pending, 0, []
        while not self._has_ended and position < len(text):
            unit = _UNIT.match(text, position)
            if unit is None:
                if _OPEN_ESCAPE.fullmatch(text, position):
                    break
                written.append("\\")  # of no escape
                position += 1
                continue
            end = unit.end()
            if _HIGH.fullmatch(unit[0]) and not is_last and _OPEN_ESCAPE.fullmatch(text, end):
                break
            if low := _HIGH.fullmatch(unit[0]) and _LOW.match(text, end):
                end = low.end()
            self._has_ended = unit[0] == '"'
            written.append("" if self._has_ended else _decoded(text[position:end]))
            position = end
        self._pending = text[position:]
        return "".join(written)


def _decoded(unit: str) -> str:
    """Characters of a string's inside, an escape, or a surrogate pair."""
    if not unit.startswith("\\"):
        return unit
    if unit[1] != "u":
        return _LETTERS.get(unit[1], unit)
    character: str = json.loads(f'"{unit}"')
    return _NO_CHARACTER if "\ud800" <= character <= "\udfff" else character


def _other(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
    if value == {}:
        return ""
    if not isinstance(value, dict) or INPUT not in value:
        return text
    found = value[INPUT]
    written = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
