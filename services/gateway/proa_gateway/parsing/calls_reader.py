"""CallsReader: reads calls that follow each other, from the opening of their section or of the first to other text."""

from proa_gateway.parsing.call_reader import CallReader, Schemas
from proa_gateway.parsing.compiled_format import Action, CompiledFormat, State, Terminal
from proa_gateway.parsing.events import MessageEvent
from proa_gateway.parsing.json_text import JsonScanner


class CallsReader:
    """`is_complete`: something else follows: `rest`, and the marker that was last given if it was not taken.
    `has_calls`: a call has started. `num_calls`: those that have ended, with those before these.
    `raw`: what was read and is text after all, since no call came of it; before `rest`. `expected`: what belongs to the
    closing of the section that has been read, if it comes next.
    """

    __slots__ = (
        "_call",
        "_compiled",
        "_expected",
        "_in_section",
        "_pending",
        "_schemas",
        "expected",
        "has_calls",
        "is_complete",
        "num_calls",
        "raw",
        "rest",
    )

    def __init__(self, compiled: CompiledFormat, schemas: Schemas, num_calls: int) -> None:
        self._compiled = compiled
        self._schemas = schemas
        self._call: CallReader | None = None  # None: between calls
        self._in_section = False  # a section was opened
        self._expected = ""  # belongs to the opening of the section that has been read
        self._pending = ""  # text that is not understood without what follows
        self.has_calls = False
        self.is_complete = False
        self.num_calls = num_calls
        self.raw = ""
        self.rest = ""
        self.expected = ""

    @property
    def scanner(self) -> JsonScanner | None:
        """The scanner of the current call's arguments, as in `CallReader.scanner`."""
        return self._call.scanner if self._call is not None else None

    def open(self, opening: Terminal, space: str = "") -> None:
        """A section or a call is opened, with `space` before it."""
        self.raw += opening.text if self.has_calls else space + opening.text
        if opening.action is Action.OPEN_SECTION:
            self._in_section, self._expected = True, opening.rest
        else:
            self._call = CallReader(self._compiled, opening, self._schemas, self.num_calls)

    def start(self, name: str) -> list[MessageEvent]:
        """Begin a call whose name is known. Its arguments follow."""
        self._call = CallReader(self._compiled, Terminal(Action.OPEN_CALL, ""), self._schemas, self.num_calls)
        self.has_calls = True
        return self._call.start(name)

    def feed(self, text: str) -> list[MessageEvent]:
        text, self._pending = self._pending + text, ""
        events: list[MessageEvent] = []
        while text and not self.is_complete:
            text = self._read_between(text) if self._call is None else self._read_call(self._call, text, events)
        self.rest += text
        return events

    def marker(self, token_id: int) -> tuple[list[MessageEvent], bool]:
        """Read a marker. Return the events, and whether the marker belongs to the calls."""
        text = self._compiled.markers[token_id]
        events = []
        if self._call is not None:
            terminal = self._compiled.terminals[State.CALL].by_id.get(token_id)
            if terminal is None:
                return self.feed(text), True
            events = self._close_call(self._call, text)
            if self.is_complete or terminal.action is Action.CLOSE_CALL:
                return events, not self.is_complete
        events += self._settle()
        if self.is_complete:
            return events, False
        space, self._pending = self._pending, ""
        return events, self._take(self._compiled.terminals[State.BETWEEN].by_id.get(token_id), space)

    def finish(self) -> list[MessageEvent]:
        """The output has ended, perhaps inside a tag between or behind calls, which is no content."""
        if self.has_calls:
            self._pending = ""
        events = self._settle()
        if self._call is not None:
            events += self._call.close(by_model=False)
            self.rest += self._end_call(self._call)
        self.is_complete = True
        return events

    def _read_call(self, call: CallReader, text: str, events: list[MessageEvent]) -> str:
        events += call.feed(text)
        return self._end_call(call) if call.is_complete else ""

    def _close_call(self, call: CallReader, closing: str) -> list[MessageEvent]:
        events = [] if call.is_started else call.start_before(closing)
        is_call = call.is_started  # the text after it is the closing
        events += call.close(by_model=True)
        rest = self._end_call(call)
        self.rest += "" if is_call else rest
        return events

    def _end_call(self, call: CallReader) -> str:
        self._call = None
        if call.is_started:
            self.has_calls, self.raw = True, ""
            self.num_calls += 1
        else:
            self.is_complete = True
        return call.rest

    def _read_between(self, text: str) -> str:
        stripped = text.lstrip()
        if not stripped:
            self._pending = text
            return ""
        space = text[: -len(stripped)]
        if self._expected:
            return self._read_expected(space, stripped)
        terminals = self._compiled.terminals[State.BETWEEN]
        if terminal := terminals.match(stripped):
            return stripped.removeprefix(terminal.text) if self._take(terminal, space) else stripped
        if terminals.begin_with(stripped):
            self._pending = text
            return ""
        return self._read_other(space, stripped)

    def _read_expected(self, space: str, stripped: str) -> str:
        expected = self._expected
        if len(stripped) < len(expected) and expected.startswith(stripped):
            self._pending = space + stripped
            return ""
        self._expected = ""
        if not stripped.startswith(expected):
            return space + stripped
        self._drop(space + expected)
        return stripped.removeprefix(expected)

    def _read_other(self, space: str, stripped: str) -> str:
        """Read text that is none of the format's own: a call without an opening, or no call."""
        implicit = self._compiled.implicit_call
        if implicit is not None and (self._in_section or self._compiled.tool_format.section is None):
            self.open(implicit, space)
            return stripped
        self.is_complete = True
        return stripped if self.has_calls else space + stripped

    def _take(self, terminal: Terminal | None, space: str) -> bool:
        """Whether the terminal belongs to the calls."""
        match terminal:
            case Terminal(action=Action.OPEN_SECTION | Action.OPEN_CALL):
                self.open(terminal, space)
                return True
            case Terminal(action=Action.CLOSE_SECTION | Action.DROP):
                self._drop(space + terminal.text)
                if terminal.action is Action.CLOSE_SECTION:
                    self.is_complete, self.expected = True, terminal.rest
                return True
        self.is_complete = True
        self._drop(space)
        return False

    def _drop(self, text: str) -> None:
        if not self.has_calls:
            self.raw += text

    def _settle(self) -> list[MessageEvent]:
        """Read the pending text: the next marker or the end has come, so no text follows it."""
        stripped = self._pending.lstrip()
        if not stripped:
            return []
        space, self._pending, self._expected = self._pending[: -len(stripped)], "", ""
        return self.feed(self._read_other(space, stripped))
