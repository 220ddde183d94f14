"""ResponseParser: turns a model's output into the events of a message, as it comes.

The parser is given the format's own tokens as ids, and the text between them. Of what the model wrote, only the
format's own texts and the whitespace beside them are missing in the message: what turns out to be no call is content.
"""

from itertools import groupby
from typing import Final

from proa_gateway.parsing.call_reader import Schemas
from proa_gateway.parsing.calls_reader import CallsReader
from proa_gateway.parsing.channel_header import ChannelHeader
from proa_gateway.parsing.compiled_format import CompiledFormat, State
from proa_gateway.parsing.events import ContentDelta, MessageEvent, ReasoningDelta
from proa_gateway.parsing.format import Route, ToolFormat
from proa_gateway.parsing.terminals import Action, Terminal

# Characters that are read at once. Text that is no call is read again, so longer texts could take quadratic time.
_MAX_PART = 4096


def is_reasoning_open(tool_format: ToolFormat, generation_prompt: str) -> bool:
    """Whether the output begins within reasoning. `generation_prompt`: the end of the prompt, which the chat template
    adds for the answer. The rest of the prompt says nothing, since users may write anything."""
    if tool_format.reasoning is None:
        return False
    opened, closed = (generation_prompt.rfind(text.strip()) for text in tool_format.reasoning)
    return opened > closed


class ResponseParser:
    """Parses one output. `text` and `marker` return the events that are certain by now, `finish` the last ones."""

    __slots__ = (
        "_calls",
        "_compiled",
        "_events",
        "_expected",
        "_fallback",
        "_header",
        "_num_calls",
        "_pending",
        "_schemas",
        "_state",
        "_terminals",
    )

    def __init__(self, compiled: CompiledFormat, schemas: Schemas, *, reasoning_open: bool) -> None:
        """`schemas`: of the request's tools. `reasoning_open`: the prompt ended within reasoning."""
        self._compiled = compiled
        self._terminals = compiled.terminals
        self._schemas = schemas
        channels = compiled.tool_format.channels
        self._header = ChannelHeader(channels) if channels else None
        self._state = State.HEADER if channels else State.START
        self._events: list[MessageEvent] = []  # not returned yet
        self._pending = ""  # text that is not understood without what follows
        self._expected: str | None = None  # dropped if it comes next, with whitespace around
        self._calls: CallsReader | None = None
        self._num_calls = 0
        self._fallback = State.CONTENT  # where to go on if what looks like a call is none
        if reasoning_open and compiled.tool_format.reasoning:
            self._state, self._expected = State.REASONING, compiled.tool_format.reasoning[0].strip()

    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        return self._num_calls if self._calls is None else self._calls.num_calls

    @property
    def in_reasoning(self) -> bool:
        return self._state is State.REASONING

    def text(self, text: str) -> list[MessageEvent]:
        if not self._pending and self._expected is None:  # the common cases, in less time than `_read`
            if self._state is State.CONTENT and self._terminals[State.CONTENT].is_certain(text):
                return [ContentDelta(text)]
            if self._state is State.REASONING and self._terminals[State.REASONING].is_certain(text):
                return [ReasoningDelta(text)]
        self._read(text)
        return self._take_events()

    def marker(self, token_id: int) -> list[MessageEvent]:
        """The next token, which is one of the format's markers."""
        if token_id in self._compiled.text_markers:
            return self.text(self._compiled.markers[token_id])
        self._settle()
        self._read_marker(token_id)
        return self._take_events()

    def finish(self) -> list[MessageEvent]:
        """The output has ended."""
        self._settle()
        while self._calls is not None:
            self._events += self._calls.finish()
            self._read(self._leave_calls(self._calls))  # text that is no call may contain another opening
            self._settle()
        if self._header is not None and self._state is State.HEADER:
            self._emit(self._header.stray_text)
        self._emit(self._pending)
        return self._take_events()

    def _take_events(self) -> list[MessageEvent]:
        events, self._events = self._events, []
        return _merged(events) if len(events) > 1 else events

    def _emit(self, text: str) -> None:
        """Text of the state's kind."""
        if text:
            self._events.append(ReasoningDelta(text) if self._state is State.REASONING else ContentDelta(text))

    def _read(self, text: str) -> None:
        unread = [text]  # last part first
        while unread:
            text = unread.pop()
            if len(text) > _MAX_PART:
                unread.append(text[_MAX_PART:])
                text = text[:_MAX_PART]
            text, self._pending = self._pending + text, ""
            if text and (rest := self._step(text)):
                unread.append(rest)

    def _step(self, text: str) -> str:
        """Read text in one state. Returns what was not read."""
        return self._skip(text, self._expected) if self._expected is not None else self._STEPS[self._state](self, text)

    def _read_marker(self, token_id: int) -> None:
        """All that is pending is whitespace, and in content and reasoning the beginning of a terminal."""
        if self._calls is not None:
            events, taken = self._calls.marker(token_id)
            self._events += events
            if self._calls.is_complete:
                self._read(self._leave_calls(self._calls))
            if not taken:
                self._settle()
                self._read_marker(token_id)
        elif terminal := self._terminals[self._state].by_id.get(token_id):
            before, self._pending = self._pending, ""
            self._leave_text(before, terminal)
        else:
            self._read(self._compiled.markers[token_id])

    def _settle(self) -> None:
        """What is pending gets no more text before the next marker, or the end."""
        if self._expected is not None and self._pending:
            self._expected = None
            self._read("")
        if self._state is State.START and self._pending.strip():
            self._state = State.CONTENT

    def _skip(self, text: str, expected: str) -> str:
        """Drop whitespace and the expected text."""
        stripped = text.lstrip()
        if expected and stripped.startswith(expected):
            self._expected = ""
            return stripped.removeprefix(expected)
        if not expected.startswith(stripped):
            self._expected = None
            return stripped
        self._pending = stripped
        return ""

    def _read_start(self, text: str) -> str:
        terminals = self._terminals[State.START]
        stripped = text.lstrip()
        if terminal := terminals.match(stripped):
            self._enter(terminal, text[: -len(stripped)])
            return stripped.removeprefix(terminal.text)
        if not stripped or terminals.begin_with(stripped):
            self._pending = text
            return ""
        self._state = State.CONTENT
        if self._compiled.begins_with_call and (implicit := self._compiled.implicit_call):
            self._enter(implicit, "")
        return text

    def _read_flow(self, text: str) -> str:
        terminals = self._terminals[self._state]
        if found := terminals.search(text):
            start, terminal = found
            self._leave_text(text[:start], terminal)
            return text[start + len(terminal.text) :]
        end = terminals.num_certain(text)
        self._emit(text[:end])
        self._pending = text[end:]
        return ""

    def _read_header(self, text: str) -> str:
        assert self._header is not None
        self._header.text(text)
        return ""

    def _read_calls(self, text: str) -> str:
        assert self._calls is not None
        self._events += self._calls.feed(text)
        return self._leave_calls(self._calls) if self._calls.is_complete else ""

    def _leave_calls(self, calls: CallsReader) -> str:
        self._calls, self._num_calls = None, calls.num_calls
        if calls.has_calls and not calls.raw:
            self._state, self._expected = State.START, ""
        else:
            self._state = State.CONTENT if calls.has_calls else self._fallback
            self._emit(calls.raw)
        return calls.rest

    def _leave_text(self, before: str, terminal: Terminal) -> None:
        """A terminal has come after `before`."""
        if self._state is State.START:
            return self._enter(terminal, before)
        body = before if terminal.action is Action.DROP else before.rstrip()
        self._emit(body)
        self._enter(terminal, before[len(body) :])

    def _enter(self, terminal: Terminal, space: str) -> None:
        match terminal.action:
            case Action.OPEN_REASONING:
                self._state, self._expected = State.REASONING, terminal.rest
            case Action.CLOSE_REASONING:
                self._state, self._expected = State.START, terminal.rest
            case Action.OPEN_SECTION | Action.OPEN_CALL:
                self._begin_calls().open(terminal, space)
            case Action.OPEN_MESSAGE | Action.OPEN_CHANNEL | Action.OPEN_BODY:
                self._enter_header(terminal)
            case Action.DROP if self._state is State.START:
                self._expected = ""

    def _enter_header(self, terminal: Terminal) -> None:
        header = self._header
        assert header is not None
        if terminal.action is Action.OPEN_BODY:
            return self._enter_body(*header.route())
        if terminal.action is Action.OPEN_MESSAGE or self._state is not State.HEADER:
            header.begin(terminal.rest)
        if terminal.action is Action.OPEN_CHANNEL:
            header.open_channel()
        self._state, self._expected = State.HEADER, None

    def _enter_body(self, route: Route, name: str) -> None:
        match route:
            case Route.REASONING:
                self._state = State.REASONING
            case Route.CONTENT:
                self._state = State.CONTENT
            case Route.CALL:
                self._events += self._begin_calls().start(name)

    def _begin_calls(self) -> CallsReader:
        self._fallback = State.REASONING if self._state is State.REASONING else State.CONTENT
        self._calls = CallsReader(self._compiled, self._schemas, self._num_calls)
        self._state, self._expected = State.CALL, None
        return self._calls

    _STEPS: Final = {
        State.START: _read_start,
        State.CONTENT: _read_flow,
        State.REASONING: _read_flow,
        State.HEADER: _read_header,
        State.CALL: _read_calls,
    }


def _merged(events: list[MessageEvent]) -> list[MessageEvent]:
    """Neighbouring parts of reasoning or content become one."""
    merged: list[MessageEvent] = []
    for kind, group in groupby(events, type):
        if kind is ReasoningDelta or kind is ContentDelta:
            texts = [event.text for event in group if isinstance(event, ReasoningDelta | ContentDelta)]
            merged.append(kind("".join(texts)))
        else:
            merged += group
    return merged
