"""Whom a sequence's text is for: a choice of a stream, which writes events, or a collector, which waits for the end.

Knows nothing of tokens, engines or HTTP.
"""

from collections.abc import Callable

import orjson

from proa_gateway.openai.rendering import Choice, Usage
from proa_gateway.openai.sse import EventWriter
from proa_gateway.output_processor import Delta


class Collector:
    """Keeps everything until it is asked for, as one delta."""

    __slots__ = ("_rest", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []  # joined once: adding each to a text would take quadratic time
        self._rest = Delta()

    @property
    def is_empty(self) -> bool:
        return not self._texts

    def text(self, text: str) -> None:
        self._texts.append(text)

    def delta(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._rest.merge(delta)

    def result(self) -> Delta:
        self._rest.text = "".join(self._texts)
        return self._rest


class ChoiceStream:
    """Writes a choice's deltas as events. While the client is slow they are merged, so nothing queues up.

    `interval`: deltas merged on purpose, the first one and the last one excepted. `wake` is called when something
    waits for `flush`. `usage`: what to say of usage in every event.
    """

    __slots__ = ("_choice", "_events", "_head", "_interval", "_num_pending", "_pending", "_tail", "_usage", "_wake")

    def __init__(
        self,
        choice: Choice,
        events: EventWriter,
        *,
        interval: int,
        wake: Callable[[], None],
        usage: Callable[[], Usage] | None = None,
    ) -> None:
        self._choice = choice
        self._events = events
        self._interval = interval
        self._wake = wake
        self._usage = usage
        self._head = choice.text_head
        self._tail = choice.text_tail
        self._pending = Collector() if choice.goes_first else None
        self._num_pending = interval  # the first one goes at once

    def text(self, text: str) -> None:
        if self._events.blocked or self._pending is not None or self._interval > 1 or self._usage is not None:
            self._keep().text(text)
            self._flush_or_wait(is_last=False)
        else:
            self._events.write(self._head + orjson.dumps(text) + self._tail)

    def delta(self, delta: Delta) -> None:
        self._keep().delta(delta)
        self._flush_or_wait(is_last=delta.finish_reason is not None)

    def flush(self) -> None:
        """Writes what is pending, unless the client is slow."""
        if self._pending is not None and not self._pending.is_empty and not self._events.blocked:
            pending, self._pending = self._pending.result(), None
            self._num_pending = 0
            self._events.write(self._choice.event(pending, self._usage() if self._usage else None))

    def _keep(self) -> Collector:
        if self._pending is None:
            self._pending = Collector()
        return self._pending

    def _flush_or_wait(self, *, is_last: bool) -> None:
        self._num_pending += 1
        if self._events.blocked:
            self._wake()
        elif is_last or self._num_pending >= self._interval:
            self.flush()
