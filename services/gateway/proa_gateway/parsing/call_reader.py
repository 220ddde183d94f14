"""CallReader: reads one call, first its name, then its arguments; or both from one JSON object."""

import json
import re
import secrets
from collections.abc import Mapping
from enum import Enum, auto

from proa_gateway.parsing.arguments_reader import ArgumentsReader, JsonReader, arguments_reader
from proa_gateway.parsing.compiled_format import CompiledFormat, State, Terminal
from proa_gateway.parsing.events import ArgumentsDelta, CallEnded, CallStarted, MessageEvent
from proa_gateway.parsing.format import CallObject, NamedIds, RandomIds
from proa_gateway.parsing.json_text import JsonScanner

_NOT_SPACE = re.compile(r"\S")
_VALUE_STARTS = re.compile(r'["{\[0-9A-Za-z\-]')
_MAX_HEADER = 1024  # characters between the opening and the arguments; what is longer is not a call


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


class CallObjectReader:
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

    def __init__(self, syntax: CallObject, *, needs_arguments: bool) -> None:
        """`needs_arguments`: an object without arguments is not a call; `name` is None before they begin."""
        self._syntax = syntax
        self._needs_arguments = needs_arguments
        self._state = _State.OPEN
        self._scanner = JsonScanner()  # of the key or value that is being read
        self._held: list[str] = []  # the key or the name that is being read
        self._arguments: list[str] = []  # not sent yet
        self._has_arguments = False  # their key has come
        self._name: str | None = None  # None: not whole yet
        self.rest = ""

    @property
    def name(self) -> str | None:
        return self._name if self._has_arguments or not self._needs_arguments else None

    @property
    def is_complete(self) -> bool:
        return self._state is _State.COMPLETE

    @property
    def scanner(self) -> JsonScanner | None:
        """The scanner of the arguments, while they are read and no text of them is held."""
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


Schemas = Mapping[str, Mapping[str, object]]  # of the tools' parameters, by the tools' names


class CallReader:
    """One call of a message. Names that are not in `schemas` are passed on like the others.

    `is_started`: the name is whole. `is_complete`: the call has ended; if it never started, it is not a call.
    `rest`: the text after the end; of what is not a call, all text that was read.
    """

    __slots__ = (
        "_compiled",
        "_envelope",
        "_has_arguments",
        "_index",
        "_opening",
        "_reader",
        "_schemas",
        "_unstarted",
        "is_complete",
        "is_started",
        "rest",
    )

    def __init__(self, compiled: CompiledFormat, opening: Terminal, schemas: Schemas, index: int) -> None:
        """`opening`: has been read already. `index`: the number of the call in its message."""
        self._compiled = compiled
        self._opening = opening
        self._schemas = schemas
        self._index = index
        self._unstarted: list[str] = []  # text read before the call started
        syntax = compiled.tool_format.arguments
        self._envelope = None
        if isinstance(syntax, CallObject):
            self._envelope = CallObjectReader(syntax, needs_arguments=compiled.implicit_call is not None)
        self._reader: ArgumentsReader | None = self._envelope  # None: the name is not known yet
        self._has_arguments = False  # an event had a part of them
        self.is_started = False
        self.is_complete = False
        self.rest = ""

    @property
    def scanner(self) -> JsonScanner | None:
        """Scans the arguments if they are passed on as they are, and nothing is held. A text that it `passes` must not
        be fed."""
        if self._has_arguments and isinstance(self._reader, JsonReader | CallObjectReader):
            return self._reader.scanner
        return None

    def feed(self, text: str) -> list[MessageEvent]:
        if self.is_started:
            return self._feed_arguments(text)
        self._unstarted.append(text)
        return self._feed_header() if self._envelope is None else self._feed_envelope(self._envelope, text)

    def start(self, name: str, id: str | None = None) -> list[MessageEvent]:
        """Start the call. `id`: as the model wrote it."""
        name = self._name_of_tool(name)
        self._unstarted.clear()
        self.is_started = True
        syntax = self._compiled.tool_format.arguments
        if not isinstance(syntax, CallObject):
            self._reader = arguments_reader(syntax, self._schemas.get(name, {}))
        return [CallStarted(self._index, id or _new_id(self._compiled.tool_format.call_ids, name, self._index), name)]

    def start_before(self, closing: str) -> list[MessageEvent]:
        """Start the call if its name is whole once this text follows, which closes the call."""
        if self._envelope is not None:
            return []
        unstarted = self._unstarted.copy()
        events = self.feed(closing)
        if not self.is_started:
            self._unstarted, self.is_complete = unstarted, False
        return events

    def close(self, *, by_model: bool) -> list[MessageEvent]:
        """End the call. `by_model`: the model closed it, so what it has not written is empty, not missing."""
        if not self.is_started:
            self._is_no_call()
        if self.is_complete:
            return []
        assert self._reader is not None
        events = self._arguments(self._reader.close(by_model=by_model))
        return events + self._end(is_empty=by_model and not self._has_arguments)

    def _name_of_tool(self, name: str) -> str:
        """Models that have learned names in namespaces write `clock.clock` for a tool `clock`."""
        namespace, _, of_tool = name.partition(".")
        return of_tool if namespace == of_tool and name not in self._schemas and of_tool in self._schemas else name

    def _feed_arguments(self, text: str) -> list[MessageEvent]:
        reader = self._reader
        assert reader is not None
        events = self._arguments(reader.feed(text))
        return (
            events + self._end_before(reader.rest, is_empty=not self._has_arguments) if reader.is_complete else events
        )

    def _feed_envelope(self, envelope: CallObjectReader, text: str) -> list[MessageEvent]:
        arguments = envelope.feed(text)
        if envelope.name is not None:
            events = self.start(envelope.name) + self._arguments(arguments)
            return events + self._end_before(envelope.rest, is_empty=False) if envelope.is_complete else events
        if envelope.is_complete:
            self._is_no_call()
        return []

    def _feed_header(self) -> list[MessageEvent]:
        header = self._opening.header
        assert header is not None
        text = "".join(self._unstarted)
        closing = self._compiled.terminals[State.CALL].search(text)
        end = min(_MAX_HEADER, closing[0] + len(closing[1].text) if closing else len(text))
        if found := header.whole.match(text, 0, end):
            groups = found.groupdict()
            return self.start(groups["name"], groups.get("id")) + self._feed_arguments(text[found.end() :])
        if closing or len(text) >= _MAX_HEADER or (header.begins and not header.begins.fullmatch(text)):
            self._is_no_call()
        else:
            self._unstarted[:] = [text]
        return []

    def _arguments(self, text: str) -> list[MessageEvent]:
        if not text:
            return []
        self._has_arguments = True
        return [ArgumentsDelta(self._index, text)]

    def _end_before(self, rest: str, *, is_empty: bool) -> list[MessageEvent]:
        self.rest = rest
        return self._end(is_empty=is_empty)

    def _end(self, *, is_empty: bool) -> list[MessageEvent]:
        self.is_complete = True
        return [*self._arguments("{}" if is_empty else ""), CallEnded(self._index)]

    def _is_no_call(self) -> None:
        self.is_complete = True
        self.rest = "".join(self._unstarted)


def _new_id(rule: RandomIds | NamedIds, name: str, index: int) -> str:
    match rule:
        case RandomIds(prefix, alphabet, length):
            return prefix + "".join(alphabet[byte % len(alphabet)] for byte in secrets.token_bytes(length))
        case NamedIds(template):
            return template.replace("$index", str(index)).replace("$name", name)
