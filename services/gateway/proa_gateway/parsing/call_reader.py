"""CallReader: reads one call, first its name, then its arguments."""

import secrets
from collections.abc import Mapping

from proa_gateway.parsing.compiled_format import CompiledFormat, State
from proa_gateway.parsing.envelope_reader import EnvelopeReader
from proa_gateway.parsing.events import ArgumentsDelta, CallEnded, CallStarted, MessageEvent
from proa_gateway.parsing.format import Envelope, NamedIds, RandomIds
from proa_gateway.parsing.json_reader import JsonReader
from proa_gateway.parsing.json_scanner import JsonScanner
from proa_gateway.parsing.reader import ArgumentsReader
from proa_gateway.parsing.readers import arguments_reader
from proa_gateway.parsing.terminals import Terminal

Schemas = Mapping[str, Mapping[str, object]]  # of the tools' parameters, by the tools' names

_MAX_HEADER = 1024  # characters between the opening and the arguments; what is longer is not a call


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
        if isinstance(syntax, Envelope):
            self._envelope = EnvelopeReader(syntax, needs_arguments=compiled.implicit_call is not None)
        self._reader: ArgumentsReader | None = self._envelope
        self._has_arguments = False
        self.is_started = False
        self.is_complete = False
        self.rest = ""

    @property
    def scanner(self) -> JsonScanner | None:
        """Scans the arguments if they are passed on as they are, and nothing is held. A text that it `passes` must not
        be fed."""
        if self._has_arguments and isinstance(self._reader, JsonReader | EnvelopeReader):
            return self._reader.scanner
        return None

    def feed(self, text: str) -> list[MessageEvent]:
        if self.is_started:
            return self._feed_arguments(text)
        self._unstarted.append(text)
        return self._feed_header() if self._envelope is None else self._feed_envelope(self._envelope, text)

    def start(self, name: str, id: str | None = None) -> list[MessageEvent]:
        """Start the call. `id`: as the model wrote it."""
        self._unstarted.clear()
        self.is_started = True
        syntax = self._compiled.tool_format.arguments
        if not isinstance(syntax, Envelope):
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

    def _feed_arguments(self, text: str) -> list[MessageEvent]:
        reader = self._reader
        assert reader is not None
        events = self._arguments(reader.feed(text))
        return (
            events + self._end_before(reader.rest, is_empty=not self._has_arguments) if reader.is_complete else events
        )

    def _feed_envelope(self, envelope: EnvelopeReader, text: str) -> list[MessageEvent]:
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
            return prefix + "".join(secrets.choice(alphabet) for _ in range(length))
        case NamedIds(template):
            return template.replace("$index", str(index)).replace("$name", name)
