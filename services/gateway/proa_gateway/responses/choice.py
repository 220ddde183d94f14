"""ResponsesChoice: the events of a response, numbered."""

from collections.abc import Sequence

import orjson

from proa_gateway.deltas import Delta
from proa_gateway.openai.envelope import Usage
from proa_gateway.parsing.events import MessageEvent
from proa_gateway.responses.output import Event, OutputItems
from proa_gateway.responses.parts import Fields


class ResponsesChoice:
    """The `EventRenderer` of `/v1/responses`. `finish_reason`: of the output, once it has ended."""

    def __init__(self, response: Fields, items: OutputItems) -> None:
        """`response`: without output, in progress."""
        self.response = response
        self.items = items
        self.finish_reason: str | None = None
        self._num_events = 0

    def opening(self, usage: Usage) -> bytes:
        return self.render(
            ("response.created", {"response": self.response}), ("response.in_progress", {"response": self.response})
        )

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        return self.render(*self.add(events, delta))

    def add(self, events: Sequence[MessageEvent], delta: Delta) -> list[Event]:
        self.finish_reason = delta.finish_reason
        return self.items.add(events, delta)

    def render(self, *events: Event) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in events)

    def _event(self, kind: str, fields: Fields) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
