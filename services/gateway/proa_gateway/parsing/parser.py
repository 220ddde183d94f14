"""ResponseParser: turns a model's output into the events of a message, as it comes. MessageConsumer: uses one as a
sink."""

from collections.abc import Sequence

from proa_gateway.output.text import Delta
from proa_gateway.parsing.call_reader import Schemas
from proa_gateway.parsing.channel_reader import ChannelReader
from proa_gateway.parsing.compiled_format import CompiledFormat, State
from proa_gateway.parsing.events import (
    ArgumentsDelta,
    CallEnded,
    ContentDelta,
    MessageEvent,
    MessageSink,
    ReasoningDelta,
    merged,
)
from proa_gateway.parsing.message_reader import MessageReader


class ResponseParser:
    """Parses one output. `text` and `marker` return the events that are certain by now, `finish` the last ones."""

    __slots__ = ("_compiled", "_reader", "_scanner")

    def __init__(
        self, compiled: CompiledFormat, schemas: Schemas, *, reasoning_open: bool, drops_space: bool = False
    ) -> None:
        """`schemas`: of the request's tools. `reasoning_open`: the prompt ended within reasoning. `drops_space`:
        whitespace before all else is not content."""
        self._compiled = compiled
        channels = compiled.tool_format.channels
        self._reader = (
            ChannelReader(compiled, channels, schemas)
            if channels is not None
            else MessageReader(compiled, schemas, reasoning_open=reasoning_open, drops_space=drops_space)
        )
        self._scanner = self._reader.scanner  # the reader's after what it has read; None: there is none

    @property
    def has_reasoning(self) -> bool:
        """Whether the format distinguishes reasoning from the rest."""
        return self._compiled.tool_format.has_reasoning

    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        return self._reader.num_calls

    @property
    def in_reasoning(self) -> bool:
        return self._reader.state is State.REASONING

    def text(self, text: str) -> list[MessageEvent]:
        return self._certain(text) or self._read(text)

    def marker(self, token_id: int) -> list[MessageEvent]:
        """The next token, which is one of the format's markers."""
        if token_id in self._compiled.text_markers:
            return self.text(self._compiled.markers[token_id])
        self._reader.marker(token_id)
        return self._take_events()

    def finish(self) -> list[MessageEvent]:
        """The output has ended."""
        self._reader.finish()
        return self._take_events()

    def _certain(self, text: str) -> list[MessageEvent]:
        """The event of a text that changes nothing, the common case, in less time than `_read`; otherwise none."""
        reader = self._reader
        if self._scanner is not None:
            return [ArgumentsDelta(reader.num_calls, text)] if self._scanner.passes(text) else []
        if reader.is_settled:
            if reader.state is State.CONTENT and self._compiled.terminals[State.CONTENT].is_certain(text):
                return [ContentDelta(text)]
            if reader.state is State.REASONING and self._compiled.terminals[State.REASONING].is_certain(text):
                return [ReasoningDelta(text)]
        return []

    def _read(self, text: str) -> list[MessageEvent]:
        self._reader.read(text)
        return self._take_events()

    def _take_events(self) -> list[MessageEvent]:
        self._scanner = self._reader.scanner
        events = self._reader.take_events()
        return merged(events) if len(events) > 1 else events


class MessageConsumer:
    """A `DeltaSink` that passes events on to `sink` within the same call.

    `is_satisfied`: without parallel calls, a call has ended; what follows it in the output is dropped.
    """

    __slots__ = ("_num_reasoning_tokens", "_parallel_calls", "_parser", "_sink", "is_satisfied")

    def __init__(self, parser: ResponseParser, sink: MessageSink, *, parallel_calls: bool = True) -> None:
        self._parser = parser
        self._sink = sink
        self._parallel_calls = parallel_calls
        self.is_satisfied = False
        self._num_reasoning_tokens = 0

    @property
    def reasoning_tokens(self) -> int | None:
        """Output tokens between those that open and close reasoning. None: the format has none."""
        return self._num_reasoning_tokens if self._parser.has_reasoning else None

    def text(self, text: str) -> None:
        self.delta(Delta(text))

    def marker(self, token_id: int) -> None:
        was_in_reasoning = self._parser.in_reasoning
        events = self._parser.marker(token_id)
        if was_in_reasoning and self._parser.in_reasoning:
            self._num_reasoning_tokens += 1
        if events:
            self._sink.events(self._needed(events), Delta())

    def delta(self, delta: Delta) -> None:
        if self._parser.in_reasoning:
            self._num_reasoning_tokens += delta.num_tokens
        events = self._parser.text(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events += self._parser.finish()
        if events or delta.token_ids or delta.prompt_logprobs or delta.finish_reason is not None:
            self._sink.events(self._needed(events), delta)

    def _needed(self, events: Sequence[MessageEvent]) -> Sequence[MessageEvent]:
        """Return the events up to the end of the first call, or all with parallel calls."""
        if self._parallel_calls:
            return events
        if self.is_satisfied:
            return []
        for index, event in enumerate(events):
            if isinstance(event, CallEnded):
                self.is_satisfied = True
                return events[: index + 1]
        return events
