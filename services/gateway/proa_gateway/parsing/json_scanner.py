"""JsonScanner: finds the end of a JSON value in text that comes in pieces."""

import re

_PLAIN = re.compile(r'[^"\\]*')  # the inside of a string
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_BETWEEN = re.compile(r"[\s,:0-9A-Za-z+\-.]*", re.ASCII)  # all that stands between strings and brackets
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]*")


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

    def is_inside(self, text: str) -> bool:
        """Whether all of the text is the inside of a string: the common case, in less time than `scan`. A text for
        which this is true need not be scanned."""
        return self._in_string and not self._escaped and not _QUOTE_OR_ESCAPE.search(text)

    def scan(self, text: str, start: int = 0) -> int:
        """Where the value ends in the text, or the text's length. The value must begin at its first character."""
        if not self._begun and start < len(text):
            self._begun = True
            if text[start] not in '"{[':
                return self._scan_scalar(text, start)
        elif not self._in_string and not self._depth and not self.is_complete:
            return self._scan_scalar(text, start)
        position = start
        while position < len(text) and not self.is_complete:
            position = self._scan_string(text, position) if self._in_string else self._scan_outside(text, position)
        return position

    def _scan_scalar(self, text: str, start: int) -> int:
        end = _end(_SCALAR, text, start)
        self.is_complete = end < len(text)
        return end

    def _scan_string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        position = _end(_PLAIN, text, position)
        if position == len(text):
            return position
        if text[position] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.is_complete = not self._depth
        return position + 1

    def _scan_outside(self, text: str, position: int) -> int:
        position = _end(_BETWEEN, text, position)
        if position == len(text):
            return position
        match text[position]:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.is_complete = not self._depth
            case _:
                self.is_complete = self.is_malformed = True
                return position
        return position + 1


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where a match of a pattern that may be empty ends."""
    match = pattern.match(text, start)
    assert match is not None
    return match.end()
