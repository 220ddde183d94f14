"""OpenString: whether text that comes in pieces has ended within a JSON string."""

import re

_MARK = re.compile(r'["\\\x00-\x1f]')


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
