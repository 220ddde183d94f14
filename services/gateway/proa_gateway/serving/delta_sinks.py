"""Delta sinks: `ChoiceStream` writes a sequence's deltas as events, `DeltaCollector` merges them into one delta."""

from collections.abc import Sequence
from typing import Any

import orjson

from proa.contract import TokenLogprobs
from proa_gateway.output.deltas import Delta
from proa_gateway.serving.answer import EventOutlet
from proa_gateway.serving.envelope import Usage
from proa_gateway.serving.rendering import Choice


class DeltaCollector:
    """Merges all deltas; `result` returns them as one."""

    __slots__ = ("_rest", "_texts")
    is_satisfied = False

    def __init__(self) -> None:
        self._texts: list[str] = []  # joined once, at the end: repeated concatenation takes quadratic time
        self._rest = Delta()

    @property
    def is_empty(self) -> bool:
        return not self._texts

    def text(self, text: str) -> None:
        self._texts.append(text)

    def delta(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._rest.merge(delta)

    def marker(self, token_id: int) -> None:
        raise AssertionError("only parsed outputs have markers")

    def result(self) -> Delta:
        self._rest.text = "".join(self._texts)
        return self._rest


class ChoiceCollector:
    """The `CollectedChoice` of an output that is not parsed."""

    markers: frozenset[int] | None = None
    num_reasoning_tokens: int | None = None

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.sink = DeltaCollector()
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()

    def final(self) -> dict[str, Any]:
        result = self.sink.result()
        self.prompt_logprobs = result.prompt_logprobs
        return self._choice.final(result)


class ChoiceStream:
    """The `StreamedChoice` of an output that is not parsed: writes its deltas as events. While the client reads too
    slowly, deltas are merged into one."""

    is_satisfied = False
    markers: frozenset[int] | None = None
    num_reasoning_tokens: int | None = None

    __slots__ = (
        "_choice",
        "_interval",
        "_merges",
        "_num_pending",
        "_on_pending",
        "_pending",
        "_text_head",
        "_text_tail",
        "_usage",
        "_writer",
    )

    def __init__(self, choice: Choice, outlet: EventOutlet) -> None:
        self._choice = choice
        self._writer = outlet.writer
        self._interval = outlet.interval
        self._on_pending = outlet.on_pending
        self._usage = outlet.usage
        self._merges = outlet.interval > 1 or outlet.usage is not None
        self._text_head = choice.text_head
        self._text_tail = choice.text_tail
        self._pending = DeltaCollector() if choice.begins_with_prompt else None
        self._num_pending = outlet.interval  # so that the first delta is written at once

    @property
    def sink(self) -> "ChoiceStream":
        return self

    def opening(self, usage: Usage) -> bytes:
        return self._choice.opening(usage if self._usage else None)

    def text(self, text: str) -> None:
        if self._writer.blocked or self._pending is not None or self._merges:
            self._collector().text(text)
            self._flush_or_wait(is_last=False)
        else:
            self._writer.write(self._text_head + orjson.dumps(text) + self._text_tail)

    def delta(self, delta: Delta) -> None:
        self._collector().delta(delta)
        self._flush_or_wait(is_last=delta.finish_reason is not None)

    def marker(self, token_id: int) -> None:
        raise AssertionError("only parsed outputs have markers")

    def flush(self) -> None:
        """Write what is pending, unless the writer is blocked."""
        if self._pending is not None and not self._pending.is_empty and not self._writer.blocked:
            pending, self._pending = self._pending.result(), None
            self._num_pending = 0
            self._writer.write(self._choice.event(pending, self._usage() if self._usage else None))

    def _collector(self) -> DeltaCollector:
        if self._pending is None:
            self._pending = DeltaCollector()
        return self._pending

    def _flush_or_wait(self, *, is_last: bool) -> None:
        self._num_pending += 1
        if self._writer.blocked:
            self._on_pending()
        elif is_last or self._num_pending >= self._interval:
            self.flush()
