"""LiteralReader: arguments in a syntax close to JSON, such as Python's literals or objects with bare keys."""

import re
from dataclasses import dataclass
from enum import Enum, auto

from proa_gateway.parsing.json_text import PYTHON_WORDS, escape, held_back, is_number, quoted, read_escape

_WORDS = PYTHON_WORDS | {word: word for word in PYTHON_WORDS.values()}
_BRACKETS = {"(": ("[", "]"), "[": ("[", "]"), "{": ("{", "}")}  # and how JSON writes them
_CLOSING = ")]}"
_STRING_END = {quote: re.compile(rf"\\|{quote}") for quote in "\"'"}
_WORD_END = re.compile(r"[,)\]}]")
_KEY_END = {separator: re.compile(rf"[,)\]}}{separator}]") for separator in ":="}


@dataclass(frozen=True, slots=True)
class LiteralSyntax:
    """`raw_quote`: begins and ends strings without escapes, besides `"` and `'`; empty: there is none.
    `separator`: between the name of an argument and its value."""

    raw_quote: str = ""
    separator: str = ":"


class _Next(Enum):
    KEY = auto()
    SEPARATOR = auto()
    VALUE = auto()


@dataclass(slots=True)
class _Frame:
    """An object or array that has begun. `separator`: between key and value; empty in an array."""

    close: str  # as JSON writes it
    separator: str
    next: _Next
    is_empty: bool = True

    def item(self) -> str:
        """A key or value begins. Returns what is written before it."""
        comma = "" if self.is_empty or (self.separator and self.next is _Next.VALUE) else ", "
        self.is_empty = False
        if self.separator:
            self.next = _Next.KEY if self.next is _Next.VALUE else _Next.SEPARATOR
        return comma

    def comma(self) -> None:
        self.next = _Next.KEY if self.separator else _Next.VALUE


class LiteralReader:
    """An `ArgumentsReader` that begins after the opening bracket of the arguments, and is complete at its match, which
    it leaves in `rest`.

    What does not begin with a quote or a bracket is a word until the next comma or bracket: a number, null, true or
    false, also in Python's spelling, or else a string. Malformed text never fails, but may give no JSON.
    """

    __slots__ = ("_frames", "_is_started", "_pending", "_quote", "_quotes", "_word")

    def __init__(self, syntax: LiteralSyntax) -> None:
        self._quotes = [quote for quote in (syntax.raw_quote, '"', "'") if quote]  # the raw one first
        self._frames = [_Frame("}", syntax.separator, _Next.KEY)]  # those that are open, the arguments first
        self._is_started = False  # the opening bracket was returned
        self._quote = ""  # of the string being read
        self._word: list[str] = []  # parts of the word being read
        self._pending = ""  # text that is not understood without what follows

    @property
    def is_complete(self) -> bool:
        return not self._frames

    @property
    def rest(self) -> str:
        return self._pending if self.is_complete else ""

    @property
    def is_between_items(self) -> bool:
        """Whether the arguments could be complete here."""
        return len(self._frames) == 1 and not self._quote and not self._word and not self._pending

    def feed(self, text: str) -> str:
        self._pending += text
        written = [] if self._is_started else ["{"]
        self._is_started = True
        while self._frames and (more := self._in_string() if self._quote else self._outside()) is not None:
            written.append(more)
        return "".join(written)

    def close(self, *, by_model: bool) -> str:
        """What has not ended stays open, so that a truncated call is no valid JSON."""
        return ""

    # Each of these reads the next piece and returns what it is in JSON; None: it takes more text.

    def _outside(self) -> str | None:
        frame = self._frames[-1]
        if self._word:
            return self._in_word(frame)
        self._pending = self._pending.lstrip()
        first = self._pending[:1]
        if not first:
            return None
        if first in _CLOSING:
            return self._end(frame)
        if first == ",":
            frame.comma()
            self._pending = self._pending[1:]
            return ""
        if frame.next is _Next.SEPARATOR and first == frame.separator:
            frame.next = _Next.VALUE
            self._pending = self._pending[1:]
            return ": "
        return self._begin(frame, first)

    def _begin(self, frame: _Frame, first: str) -> str | None:
        for quote in self._quotes:
            if self._pending.startswith(quote):
                self._quote = quote
                self._pending = self._pending.removeprefix(quote)
                return f'{frame.item()}"'
            if quote.startswith(self._pending):
                return None
        if first in _BRACKETS and frame.next is _Next.VALUE:
            begin, end = _BRACKETS[first]
            written = frame.item() + begin
            self._frames.append(_Frame(end, ":", _Next.KEY) if end == "}" else _Frame(end, "", _Next.VALUE))
            self._pending = self._pending[1:]
            return written
        return self._in_word(frame)

    def _end(self, frame: _Frame) -> str:
        self._frames.pop()
        if self._frames:
            self._pending = self._pending[1:]
        return frame.close

    def _in_word(self, frame: _Frame) -> str | None:
        is_value = frame.next is _Next.VALUE
        found = _WORD_END.search(self._pending) if is_value else _KEY_END[frame.separator].search(self._pending)
        self._word.append(self._pending[: found.start() if found else None])
        self._pending = self._pending[found.start() :] if found else ""
        if not found:
            return None
        word = "".join(self._word).strip()
        self._word.clear()
        written = _WORDS.get(word) or (word if is_number(word) else quoted(word))
        return frame.item() + (written if is_value else quoted(word))

    def _in_string(self) -> str | None:
        if len(self._quote) > 1:
            return self._in_raw_string()
        found = _STRING_END[self._quote].search(self._pending)
        text = self._pending[: found.start() if found else None]
        self._pending = self._pending[len(text) :]
        if text or not found:
            return escape(text) if text else None
        return self._escape() if found[0] == "\\" else self._end_string()

    def _in_raw_string(self) -> str | None:
        text, found, after = self._pending.partition(self._quote)
        if found:
            self._pending = self._quote + after
        else:
            held = held_back(text, self._quote)
            text = text[: len(text) - held]
            self._pending = self._pending[len(text) :]
        if text or not found:
            return escape(text) if text else None
        return self._end_string()

    def _end_string(self) -> str:
        self._pending = self._pending.removeprefix(self._quote)
        self._quote = ""
        return '"'

    def _escape(self) -> str | None:
        escape_read = read_escape(self._pending)
        if escape_read is None:
            return None
        written, size = escape_read
        self._pending = self._pending[size:]
        return written


def literal_to_json(text: str) -> str | None:
    """A Python literal, of an array or object, as JSON. None if it does not end."""
    reader = LiteralReader(LiteralSyntax())
    wrapped = reader.feed(f'"":{text}')
    return wrapped.removeprefix('{"": ') if reader.is_between_items else None
