"""What a message consists of, as it is generated. The three chat APIs render the same events."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

from proa_gateway.output.text import Delta


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """`index` counts the calls of the message. `id` is the client's name for it, unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A part of the JSON text of a call's arguments."""

    index: int  # of the call
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    index: int  # of the call


MessageEvent = ReasoningDelta | ContentDelta | CallStarted | ArgumentsDelta | CallEnded


class MessageSink(Protocol):
    """Receives a message as it is generated. Calls must not block."""

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        """Receive the next events. There are none if only `delta` has something: token ids, log probabilities, the end
        of the output.

        The text of `delta` is what the model wrote; the text to show is that of the events.
        """


def merged(events: Sequence[MessageEvent]) -> list[MessageEvent]:
    """The events with neighbouring parts of the same text as one."""
    return [_joined(list(group)) for _, group in groupby(events, key=_kind)]


def _kind(event: MessageEvent) -> tuple[type, int]:
    return type(event), getattr(event, "index", 0)


def _joined(group: Sequence[MessageEvent]) -> MessageEvent:
    first = group[0]
    if isinstance(first, ReasoningDelta | ContentDelta | ArgumentsDelta) and len(group) > 1:
        return replace(first, text="".join(event.text for event in group if isinstance(event, type(first))))
    return first
