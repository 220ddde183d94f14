"""JsonScanner: finds the end of a JSON value in text that comes in pieces."""

import re

_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_JSON = re.compile(r'[\s,:0-9A-Za-z+\-."{}\[\]]*', re.ASCII)  # what may stand outside of strings
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
# What stands between two brackets, as far as its strings have ended. Without possessive quantifiers: behind a string
# that has not ended, Python 3.11.2 loses its place. The time is linear, as no two parts can match the same character.
_BETWEEN = re.compile(rf'(?:[\s,:0-9A-Za-z+\-.]+|"{_IN_STRING.pattern}")*', re.ASCII | re.DOTALL)


class JsonScanner:
    """Scans one value. It checks no more of the syntax than it needs for finding the end.

    `is_malformed`: the value ended at a character that cannot stand in it.
    """

    __slots__ = ("_begun", "_depth", "_escaped", "_in_string", "is_complete", "is_malformed")

    def __init__(self) -> None:
        self._begun = False
        self._depth = 0
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
