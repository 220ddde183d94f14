"""MessageConsumer: parses an output into a message as it comes."""

from collections.abc import Sequence

from proa_gateway.output.deltas import Delta
from proa_gateway.parsing.events import CallEnded, MessageEvent, MessageSink
from proa_gateway.parsing.parser import ResponseParser


class MessageConsumer:
    """A `DeltaSink` that passes events on to `sink` within the same call.

    `reasoning_tokens`: output tokens between the tokens that open and close reasoning.
    `is_satisfied`: without parallel calls, a call has ended; what follows it in the output is dropped.
    """

    __slots__ = ("_parallel_calls", "_parser", "_sink", "is_satisfied", "reasoning_tokens")

    def __init__(self, parser: ResponseParser, sink: MessageSink, *, parallel_calls: bool = True) -> None:
        self._parser = parser
        self._sink = sink
        self._parallel_calls = parallel_calls
        self.is_satisfied = False
        self.reasoning_tokens = 0

    def text(self, text: str) -> None:
        self.delta(Delta(text))

    def marker(self, token_id: int) -> None:
        was_in_reasoning = self._parser.in_reasoning
        events = self._parser.marker(token_id)
        if was_in_reasoning and self._parser.in_reasoning:
            self.reasoning_tokens += 1
        if events:
            self._sink.events(self._needed(events), Delta())

    def delta(self, delta: Delta) -> None:
        if self._parser.in_reasoning:
            self.reasoning_tokens += delta.num_tokens
        events = self._parser.text(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            events += self._parser.finish()
        if events or delta.token_ids or delta.prompt_logprobs or delta.finish_reason is not None:
            self._sink.events(self._needed(events), delta)

    def _needed(self, events: Sequence[MessageEvent]) -> Sequence[MessageEvent]:
        """Without parallel calls, those up to the end of the first call."""
        if self._parallel_calls:
            return events
        if self.is_satisfied:
            return []
        for index, event in enumerate(events):
            if isinstance(event, CallEnded):
                self.is_satisfied = True
                return events[: index + 1]
        return events
