"""Message sinks: `MessageStream` writes a message's events, `MessageCollector` keeps them. Both are for all APIs.

    MessageConsumer -> MessageStream    -> MessageChoice.event -> ResponseWriter
    MessageConsumer -> MessageCollector -> MessageChoice.final -> the body

Plain chats, whose output is not parsed, have the shorter way of `delta_sinks.py`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from proa.contract import TokenLogprobs
from proa_gateway.output.deltas import Delta, DeltaSink
from proa_gateway.parsing.consumer import MessageConsumer
from proa_gateway.parsing.events import ContentDelta, MessageEvent, MessageSink, merged
from proa_gateway.serving.answer import EventOutlet
from proa_gateway.serving.delta_sinks import DeltaCollector
from proa_gateway.serving.envelope import Usage
from proa_gateway.serving.message_format import MessageFormat


class EventRenderer(Protocol):
    """Renders one choice as an API's events. Stateful: `opening` comes first, and events come in order."""

    def opening(self, usage: Usage) -> bytes:
        """The events before the first delta, or nothing. `usage`: of the prompt."""
        ...

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        """The API's events for these, possibly none. Neighbouring parts of one text are merged already. The last call
        has `delta.finish_reason`. `usage`: to put into the event."""
        ...


class MessageChoice(EventRenderer, Protocol):
    """Renders one choice in an API's form."""

    def final(self, events: Sequence[MessageEvent], delta: Delta) -> dict[str, Any]:
        """The choice's part of a response that is not streamed, from all events, merged."""
        ...


class TextConsumer:
    """The `DeltaSink` of an output that is not parsed: its text is the content."""

    is_satisfied = False
    reasoning_tokens = 0

    def __init__(self, sink: MessageSink) -> None:
        self._sink = sink

    def text(self, text: str) -> None:
        self.delta(Delta(text))

    def delta(self, delta: Delta) -> None:
        self._sink.events([ContentDelta(delta.text)] if delta.text else [], delta)

    def marker(self, token_id: int) -> None:
        raise AssertionError("only parsed outputs have markers")


class _Pending:
    """Merges events and their deltas."""

    def __init__(self) -> None:
        self._events: list[MessageEvent] = []
        self._delta = DeltaCollector()

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        self._events += events
        self._delta.delta(delta)

    def result(self) -> tuple[list[MessageEvent], Delta]:
        return merged(self._events), self._delta.result()


class MessageOutput:
    """A `ChoiceOutput` that turns deltas into events for a `MessageSink`."""

    def __init__(self, sink: MessageSink, message_format: MessageFormat | None) -> None:
        """`message_format`: None: all text is content."""
        self._format = message_format
        if message_format is not None:
            self._consumer: MessageConsumer | TextConsumer = MessageConsumer(
                message_format.parser(), sink, parallel_calls=message_format.parallel_calls
            )
        else:
            self._consumer = TextConsumer(sink)

    @property
    def sink(self) -> DeltaSink:
        return self._consumer

    @property
    def markers(self) -> frozenset[int] | None:
        return self._format.markers if self._format is not None else None

    @property
    def num_reasoning_tokens(self) -> int | None:
        has_reasoning = self._format is not None and self._format.has_reasoning
        return self._consumer.reasoning_tokens if has_reasoning else None


class MessageCollector(MessageOutput):
    """The `CollectedChoice` of a message."""

    def __init__(self, choice: MessageChoice, message_format: MessageFormat | None) -> None:
        self._choice = choice
        self._pending = _Pending()
        super().__init__(self._pending, message_format)
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()

    def final(self) -> dict[str, Any]:
        events, delta = self._pending.result()
        self.prompt_logprobs = delta.prompt_logprobs
        return self._choice.final(events, delta)


class MessageStream(MessageOutput):
    """The `StreamedChoice` of a message. While the client reads too slowly, events are merged."""

    def __init__(self, choice: EventRenderer, message_format: MessageFormat | None, outlet: EventOutlet) -> None:
        super().__init__(self, message_format)
        self._choice = choice
        self._outlet = outlet
        self._merges = outlet.interval > 1
        self._pending: _Pending | None = None
        self._num_pending = outlet.interval  # so that the first event is written at once

    def opening(self, usage: Usage) -> bytes:
        return self._choice.opening(usage)

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        """Write the events, or keep them while the client reads too slowly."""
        if not (self._outlet.writer.blocked or self._pending is not None or self._merges):
            self._write(events, delta)
            return
        if self._pending is None:
            self._pending = _Pending()
        self._pending.events(events, delta)
        self._num_pending += 1
        if self._outlet.writer.blocked:
            self._outlet.on_pending()
        elif delta.finish_reason is not None or self._num_pending >= self._outlet.interval:
            self.flush()

    def flush(self) -> None:
        if self._pending is not None and not self._outlet.writer.blocked:
            pending, self._pending = self._pending, None
            self._num_pending = 0
            self._write(*pending.result())

    def _write(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        usage = self._outlet.usage
        if data := self._choice.event(events, delta, usage() if usage else None):
            self._outlet.writer.write(data)
