"""MessageConsumer: parses an output into a message as it comes. MessageCollector: keeps the message as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from proa_gateway.output_processor import Delta
from proa_gateway.parsing.events import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    MessageEvent,
    MessageSink,
    ReasoningDelta,
)
from proa_gateway.parsing.parser import ResponseParser


class MessageConsumer:
    """A `DeltaSink` that passes events on to `sink` within the same call.

    `reasoning_tokens`: output tokens between the tokens that open and close reasoning.
    """

    __slots__ = ("_parser", "_sink", "reasoning_tokens")

    def __init__(self, parser: ResponseParser, sink: MessageSink) -> None:
        self._parser = parser
        self._sink = sink
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """Whether a call has ended. At the end of the output, all have."""
        return self._parser.num_calls > 0

    def text(self, text: str) -> None:
        self.delta(Delta(text))

    def marker(self, token_id: int) -> None:
        was_in_reasoning = self._parser.in_reasoning
        events = self._parser.marker(token_id)
        if was_in_reasoning and self._parser.in_reasoning:
            self.reasoning_tokens += 1
        if events:
            self._sink.events(events, Delta())

    def delta(self, delta: Delta) -> None:
        if self._parser.in_reasoning:
            self.reasoning_tokens += delta.num_tokens
        events = self._parser.text(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events += self._parser.finish()
        if events or delta.token_ids or delta.prompt_logprobs or delta.finish_reason is not None:
            self._sink.events(events, delta)


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: JSON text, as the model wrote it; not valid if the output was truncated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """Texts are empty if the model wrote none."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


class MessageCollector:
    """A `MessageSink` that keeps everything, for answers that are not streamed.

    `delta`: all deltas merged, without their text.
    """

    def __init__(self) -> None:
        self.delta = Delta()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[CallStarted, list[str]]] = []

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        for event in events:
            match event:
                case ReasoningDelta(text):
                    self._reasoning.append(text)
                case ContentDelta(text):
                    self._content.append(text)
                case CallStarted():
                    self._calls.append((event, []))
                case ArgumentsDelta(index, text):
                    self._calls[index][1].append(text)
        self.delta.prompt_logprobs += delta.prompt_logprobs
        self.delta.merge(delta)

    @property
    def message(self) -> Message:
        calls = tuple(Call(call.id, call.name, "".join(arguments)) for call, arguments in self._calls)
        return Message("".join(self._reasoning), "".join(self._content), calls)
