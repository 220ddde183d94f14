"""EnvelopeReader: a call written as a JSON object with its name and arguments. The arguments are passed on verbatim."""

import json
import re
from enum import Enum, auto

from proa_gateway.parsing.format import Envelope
from proa_gateway.parsing.json_scanner import JsonScanner

_NOT_SPACE = re.compile(r"\S")
_VALUE_STARTS = re.compile(r'["{\[0-9A-Za-z\-]')


class _State(Enum):
    OPEN = auto()
    BEFORE_KEY = auto()
    KEY = auto()
    COLON = auto()
    BEFORE_VALUE = auto()
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()  # the value of a key that is ignored
    COMPLETE = auto()


_SCANNED = frozenset({_State.KEY, _State.NAME, _State.ARGUMENTS, _State.OTHER})


class EnvelopeReader:
    """An `ArgumentsReader` that reads the name as well. Arguments before the name are held until it is known.

    `name`: None until it is known. An envelope that is complete without one is not a call.
    """

    __slots__ = (
        "_arguments",
        "_has_arguments",
        "_held",
        "_name",
        "_needs_arguments",
        "_scanner",
        "_state",
        "_syntax",
        "rest",
    )

    def __init__(self, syntax: Envelope, *, needs_arguments: bool) -> None:
        """`needs_arguments`: an object without arguments is not a call; `name` is None before they begin."""
        self._syntax = syntax
        self._needs_arguments = needs_arguments
        self._state = _State.OPEN
        self._scanner = JsonScanner()  # of the key or value that is being read
        self._held: list[str] = []  # the key or the name that is being read
        self._arguments: list[str] = []  # not sent yet
        self._has_arguments = False
        self._name: str | None = None
        self.rest = ""

    @property
    def name(self) -> str | None:
        return self._name if self._has_arguments or not self._needs_arguments else None

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE

    @property
    def scanner(self) -> JsonScanner | None:
        """That of the arguments, while they are read and nothing is held."""
        return self._scanner if self._state is _State.ARGUMENTS and not self._arguments else None

    def feed(self, text: str) -> str:
        position = 0
        while position < len(text) and self._state is not _State.COMPLETE:
            position = self._scan(text, position) if self._state in _SCANNED else self._step(text, position)
        if self._state is _State.COMPLETE and not self.rest:
            self.rest = text[position:]
        return self._release()

    def close(self, *, by_model: bool) -> str:
        return ""

    def _release(self) -> str:
        if self.name is None or not self._arguments:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _scan(self, text: str, start: int) -> int:
        end = self._scanner.scan(text, start)
        if self._state is _State.ARGUMENTS:
            self._arguments.append(text[start:end])
        elif self._state is not _State.OTHER:
            self._held.append(text[start:end])
        if self._scanner.is_malformed:
            self._state = _State.COMPLETE
        elif self._scanner.is_complete:
            self._value_ended()
        return end

    def _value_ended(self) -> None:
        ended, self._state = self._state, _State.BEFORE_KEY
        self._scanner = JsonScanner()
        if ended is _State.KEY:
            self._state = _State.COLON
        elif ended is _State.NAME:
            self._name = _string("".join(self._held))
            if self._name is None:
                self._state = _State.COMPLETE

    def _step(self, text: str, position: int) -> int:
        """Read one character between keys and values."""
        found = _NOT_SPACE.search(text, position)
        if found is None:
            return len(text)
        next_state = self._after(found[0])
        self._state = next_state or _State.COMPLETE
        # The first character of a key or value belongs to what is scanned; one that is wrong, to the rest.
        return found.start() if next_state is None or next_state in _SCANNED else found.end()

    def _after(self, character: str) -> _State | None:
        """The state after a character between keys and values; None if it cannot stand there."""
        match self._state, character:
            case (_State.OPEN, "{") | (_State.BEFORE_KEY, ","):
                return _State.BEFORE_KEY
            case _State.BEFORE_KEY, '"':
                self._held.clear()
                return _State.KEY
            case _State.BEFORE_KEY, "}":
                return self._end()
            case _State.COLON, ":":
                return _State.BEFORE_VALUE
            case _State.BEFORE_VALUE, _ if _VALUE_STARTS.match(character):
                return self._value_of(_string("".join(self._held)))
        return None

    def _value_of(self, key: str | None) -> _State:
        self._held.clear()
        if key == self._syntax.name and self._name is None:
            return _State.NAME
        if (key == self._syntax.arguments or key in self._syntax.aliases) and not self._has_arguments:
            self._has_arguments = True
            return _State.ARGUMENTS
        return _State.OTHER

    def _end(self) -> _State:
        if not self._has_arguments:
            self._arguments.append("{}")
        return _State.COMPLETE


def _string(text: str) -> str | None:
    """The value of a JSON string that can be encoded as UTF-8; None for other JSON."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value.encode(errors="replace").decode() if isinstance(value, str) else None
