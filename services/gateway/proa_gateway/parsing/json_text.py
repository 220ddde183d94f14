"""JSON text that comes in pieces: where a value or a string ends, and pieces that are written as JSON."""

import json
import re
import sys

PYTHON_WORDS = {"None": "null", "True": "true", "False": "false"}  # and what they are in JSON
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_ESCAPES = {
    **{letter: f"\\{letter}" for letter in '"\\bfnrt'},
    **{"'": "'", "/": "/", "\n": "", "0": "\\u0000", "a": "\\u0007", "v": "\\u000b"},
}
_CODES = {"x": 2, "u": 4, "U": 8}  # hexadecimal digits after the letter
_HEXADECIMAL = re.compile("[0-9a-fA-F]*")
_MARK = re.compile(r'["\\\x00-\x1f]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_JSON = re.compile(r'[\s,:0-9A-Za-z+\-."{}\[\]]*', re.ASCII)  # what may stand outside of strings
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
# What stands between two brackets, as far as its strings have ended. Without possessive quantifiers: behind a string
# that has not ended, Python 3.11.2 loses its place. The time is linear, as no two parts can match the same character.
_BETWEEN = re.compile(rf'(?:[\s,:0-9A-Za-z+\-.]+|"{_IN_STRING.pattern}")*', re.ASCII | re.DOTALL)


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


class OpenString:
    """`is_open`: the text so far ends within a string. `may_be_json`: nothing was found that JSON cannot have."""

    __slots__ = ("_escaped", "_in_string", "_is_json")

    def __init__(self, *, may_be_json: bool = True) -> None:
        self._is_json: bool | None = None if may_be_json else False  # None: nothing but whitespace has come
        self._in_string = False
        self._escaped = False  # the next character follows a backslash

    @property
    def is_open(self) -> bool:
        return bool(self._is_json) and self._in_string

    @property
    def may_be_json(self) -> bool:
        return self._is_json is not False

    def feed(self, text: str) -> None:
        if self._is_json is None and (first := text.lstrip()[:1]):
            self._is_json = first in '{["'
        position = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while self._is_json and (mark := _MARK.search(text, position)):
            position = mark.end()
            if mark[0] == '"':
                self._in_string = not self._in_string
            elif self._in_string and mark[0] != "\\":
                self._is_json = False  # a line must not end within a string
            elif self._in_string:
                self._escaped = position == len(text)
                position += 1


class JsonScanner:
    """Scans one value. It checks no more of the syntax than it needs for finding the end.

    `is_malformed`: the value ended at a character that cannot stand in it.
    """

    __slots__ = ("_begun", "_depth", "_escaped", "_in_string", "is_complete", "is_malformed")

    def __init__(self) -> None:
        self._begun = False  # the value's first character has come
        self._depth = 0  # brackets that are open
        self._in_string = False
        self._escaped = False  # the next character follows a backslash
        self.is_complete = False
        self.is_malformed = False

    def passes(self, text: str) -> bool:
        """Scan the text if the value cannot end in it, the common case, in less time than `scan`. False: nothing was
        scanned."""
        if self._in_string and not self._escaped and not _QUOTE_OR_ESCAPE.search(text):
            return True
        if not _JSON.fullmatch(text) or text.count("}") + text.count("]") >= self._depth:
            return False
        self._scan(text, 0)
        return True

    def scan(self, text: str, start: int = 0) -> int:
        """Where the value ends in the text, or the text's length. The value must begin at its first character."""
        if self.is_complete or start == len(text):
            return start
        is_scalar = text[start] not in '"{[' if not self._begun else not (self._in_string or self._depth)
        self._begun = True
        return self._scan_scalar(text, start) if is_scalar else self._scan(text, start)

    def _scan_scalar(self, text: str, start: int) -> int:
        end = _end(_SCALAR, text, start)
        self.is_complete = end < len(text)
        return end

    def _scan(self, text: str, position: int) -> int:
        if self._in_string:
            position = self._scan_string(text, position)
        while not self.is_complete:
            if self._depth:
                position = _end(_BETWEEN, text, position)
            if position == len(text):
                break
            position = self._scan_character(text, position)
        return position

    def _scan_character(self, text: str, position: int) -> int:
        """A bracket, a string that does not end in the text or is the whole value, or what cannot stand there."""
        match text[position]:
            case '"':
                self._in_string = True
                return self._scan_string(text, position + 1)
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.is_complete = not self._depth
            case _:
                self.is_complete = self.is_malformed = True
                self._depth = 0
                return position
        return position + 1

    def _scan_string(self, text: str, position: int) -> int:
        if position == len(text):
            return position
        position = _end(_IN_STRING, text, position + self._escaped)
        self._escaped = position < len(text) and text[position] == "\\"
        if position < len(text) and not self._escaped:
            self._in_string = False
            self.is_complete = not self._depth
        return min(position + 1, len(text))


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where a match of a pattern that may be empty ends."""
    match = pattern.match(text, start)
    assert match is not None
    return match.end()
