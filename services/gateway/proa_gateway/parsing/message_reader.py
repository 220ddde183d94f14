"""MessageReader: the states of a `ResponseParser`, and what moves it from one to another.

    from              by                                   to
    START             a text that begins nothing           CONTENT
    START, CONTENT    the opening of reasoning             REASONING
    REASONING         its end                              START: whitespace behind it is dropped
    any of these      the opening of a section or a call   CALL
    CALL              the end of the calls                 START
    CALL              what is no call                      where it came from, and it is read again as a text of there

`ChannelReader` has HEADER too, and `CallsReader` BETWEEN.
"""

from typing import Final

from proa_gateway.parsing.call_reader import Schemas
from proa_gateway.parsing.calls_reader import CallsReader
from proa_gateway.parsing.compiled_format import Action, CompiledFormat, State, Terminal
from proa_gateway.parsing.events import ContentDelta, MessageEvent, ReasoningDelta
from proa_gateway.parsing.json_text import JsonScanner

# Characters that are read at once. Text that is no call is read again, so longer texts could take quadratic time.
_MAX_PART = 4096


class MessageReader:
    """Reads the text and the markers of one output. `take_events` returns what they are, neighbours not merged."""

    __slots__ = (
        "_calls",
        "_compiled",
        "_events",
        "_expected",
        "_fallback",
        "_num_calls",
        "_pending",
        "_schemas",
        "state",
    )

    def __init__(
        self, compiled: CompiledFormat, schemas: Schemas, *, reasoning_open: bool, drops_space: bool = False
    ) -> None:
        self._compiled = compiled
        self._schemas = schemas
        self.state = State.START
        self._events: list[MessageEvent] = []  # not taken yet
        self._pending = ""  # text that is not understood without what follows
        self._expected = "" if drops_space else None  # dropped if it comes next, with whitespace around
        self._calls: CallsReader | None = None  # None: no calls are being read
        self._num_calls = 0  # that ended before `_calls`
        self._fallback = State.CONTENT  # where to go on if what looks like a call is none
        if reasoning_open and compiled.tool_format.reasoning:
            self.state, self._expected = State.REASONING, compiled.tool_format.reasoning[0].strip()

    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        return self._num_calls if self._calls is None else self._calls.num_calls

    @property
    def is_settled(self) -> bool:
        """Whether no earlier text matters for what follows."""
        return not self._pending and self._expected is None

    @property
    def scanner(self) -> JsonScanner | None:
        """Scans the arguments of a call that are passed on as they are; None: none are being read."""
        return self._calls.scanner if self._calls is not None else None

    def take_events(self) -> list[MessageEvent]:
        events, self._events = self._events, []
        return events

    def read(self, text: str) -> None:
        unread = [text]  # last part first
        while unread:
            text = unread.pop()
            if len(text) > _MAX_PART:
                unread.append(text[_MAX_PART:])
                text = text[:_MAX_PART]
            text, self._pending = self._pending + text, ""
            if text and (rest := self._step(text)):
                unread.append(rest)

    def marker(self, token_id: int) -> None:
        self._settle()
        self._read_marker(token_id)

    def finish(self) -> None:
        """The output has ended."""
        self._settle()
        while self._calls is not None:
            self._events += self._calls.finish()
            self.read(self._leave_calls(self._calls))  # text that is no call may contain another opening
            self._settle()
        self._emit(self._pending)

    def _emit(self, text: str) -> None:
        """Text of the state's kind."""
        if text:
            self._events.append(ReasoningDelta(text) if self.state is State.REASONING else ContentDelta(text))

    def _step(self, text: str) -> str:
        """Read text in one state. Returns what was not read."""
        return self._skip(text, self._expected) if self._expected is not None else self._STEPS[self.state](self, text)

    def _read_marker(self, token_id: int) -> None:
        """All that is pending is whitespace, and in content and reasoning the beginning of a terminal."""
        if self._calls is not None:
            events, taken = self._calls.marker(token_id)
            self._events += events
            if self._calls.is_complete:
                self.read(self._leave_calls(self._calls))
            if not taken:
                self._settle()
                self._read_marker(token_id)
        elif terminal := self._compiled.terminals[self.state].by_id.get(token_id):
            before, self._pending = self._pending, ""
            self._leave_text(before, terminal)
        else:
            self.read(self._compiled.markers[token_id])

    def _settle(self) -> None:
        """Read the pending text: the next marker or the end has come, so no text follows it."""
        if self._expected is not None and self._pending:
            self._expected = None
            self.read("")
        if self.state is State.START and self._pending.strip():
            self.state = State.CONTENT

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
        terminals = self._compiled.terminals[State.START]
        stripped = text.lstrip()
        if terminal := terminals.match(stripped):
            self._enter(terminal, text[: -len(stripped)])
            return stripped.removeprefix(terminal.text)
        if not stripped or terminals.begin_with(stripped):
            self._pending = text
            return ""
        self.state = State.CONTENT
        if self._compiled.begins_with_call and (implicit := self._compiled.implicit_call):
            self._enter(implicit, "")
        return text

    def _read_flow(self, text: str) -> str:
        before, terminal, rest = self._compiled.terminals[self.state].split(text)
        if terminal is not None:
            self._leave_text(before, terminal)
            return rest
        self._emit(before)
        self._pending = rest
        return ""

    def _read_calls(self, text: str) -> str:
        assert self._calls is not None
        self._events += self._calls.feed(text)
        return self._leave_calls(self._calls) if self._calls.is_complete else ""

    def _leave_calls(self, calls: CallsReader) -> str:
        self._calls, self._num_calls = None, calls.num_calls
        if calls.has_calls and not calls.raw:
            self.state, self._expected = State.START, calls.expected
        else:
            self.state = State.CONTENT if calls.has_calls else self._fallback
            self._emit(calls.raw)
        return calls.rest

    def _leave_text(self, before: str, terminal: Terminal) -> None:
        """A terminal has come after `before`."""
        if self.state is State.START:
            return self._enter(terminal, before)
        body = before if terminal.action is Action.DROP else before.rstrip()
        self._emit(body)
        self._enter(terminal, before[len(body) :])

    def _enter(self, terminal: Terminal, space: str) -> None:
        match terminal.action:
            case Action.OPEN_REASONING:
                self.state, self._expected = State.REASONING, terminal.rest
            case Action.CLOSE_REASONING:
                self.state, self._expected = State.START, terminal.rest
            case Action.OPEN_SECTION | Action.OPEN_CALL:
                self._begin_calls().open(terminal, space)
            case Action.DROP if self.state is State.START:
                self._expected = ""

    def _begin_calls(self) -> CallsReader:
        self._fallback = State.REASONING if self.state is State.REASONING else State.CONTENT
        self._calls = CallsReader(self._compiled, self._schemas, self._num_calls)
        self.state, self._expected = State.CALL, None
        return self._calls

    _STEPS: Final = {
        State.START: _read_start,
        State.CONTENT: _read_flow,
        State.REASONING: _read_flow,
        State.CALL: _read_calls,
    }
