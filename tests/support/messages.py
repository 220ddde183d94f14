"""A parsed message as a whole, with the ids of its calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import ArgumentsDelta, CallStarted, ContentDelta, MessageEvent, ReasoningDelta


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
    """A `MessageSink` that keeps everything. `delta`: all deltas merged, without their text."""

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
        self.delta.merge(delta)

    def copy(self) -> "MessageCollector":
        copied = MessageCollector()
        copied.delta = replace(self.delta)
        copied._reasoning, copied._content = ["".join(self._reasoning)], ["".join(self._content)]
        copied._calls = [(call, ["".join(arguments)]) for call, arguments in self._calls]
        return copied

    @property
    def message(self) -> Message:
        calls = tuple(Call(call.id, call.name, "".join(arguments)) for call, arguments in self._calls)
        return Message("".join(self._reasoning), "".join(self._content), calls)
