"""OutputProcessor: turns one sequence's tokens into text as they arrive from the engine, and cuts it at stop strings.

There is no queue between engine and client: when `token` returns, the token's event is in the client's socket, unless
the client reads too slowly.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from proa.contract import EngineCoreOutput, EventType, FinishReason, TokenLogprobs
from proa.text import TextDelta, TextStream
from proa_gateway.errors import GatewayError, GrammarFailed
from proa_gateway.output.logprob_columns import LogprobColumns

FinishName = Literal["stop", "length", "abort", "repetition"]
_NAMES: dict[FinishReason, FinishName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.COMPLETE: "stop",
    FinishReason.REPETITION: "repetition",
}


@dataclass(slots=True)
class Delta:
    """Output of a sequence since its previous delta, without what a stop string may still cut off."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty unless the sink's response has them, like `logprobs`
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each of `token_ids`, or none
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # all of them, in the first delta
    finish_reason: FinishName | None = None  # None: the sequence goes on
    stop_reason: int | str | None = None  # the stop token or stop string; None for an end-of-sequence token
    num_tokens: int = 0  # of `text`, if the sequence has `markers`
    num_cached_tokens: int = 0  # of the prompt

    def merge(self, later: "Delta") -> None:
        """Append `later`, except its text: repeated concatenation takes quadratic time, so callers join texts."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.num_tokens += later.num_tokens
        self.num_cached_tokens = later.num_cached_tokens


class DeltaSink(Protocol):
    """Receives a sequence's output. Calls must not block."""

    @property
    def is_satisfied(self) -> bool:
        """Whether no more output is needed: the sequence then ends as at a stop token. Only a sequence with `markers`
        is ended so, and the last delta follows."""
        ...

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far. None: reasoning is not distinguished from the rest."""
        ...

    def text(self, text: str) -> None:
        """A delta that has nothing but text. Not called for a sequence with `markers`."""

    def delta(self, delta: Delta) -> None: ...

    def marker(self, token_id: int) -> None:
        """A token of the sequence's `markers`, after all text before it. Its id and log probabilities come with the
        next delta."""


class EngineSequence(Protocol):
    """Receives the outputs of one engine request. After a failover the next engine's output continues the same one."""

    @property
    def received(self) -> Sequence[int]:
        """All output token ids from the engine, so that another engine can resume after them."""
        ...

    @property
    def num_tokens(self) -> int:
        """Output tokens for the usage."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the engine's prefix cache."""
        ...

    @property
    def reasoning_tokens(self) -> int | None:
        """Those of `num_tokens` that are reasoning. None: it is not distinguished from the rest."""
        ...

    @property
    def times(self) -> Mapping[EventType, float]:
        """When each of these happened first, by the engine's clock in Unix seconds."""
        ...

    @property
    def finish_reason(self) -> FinishName | None: ...

    def token(self, token_id: int) -> None: ...

    def output(self, output: EngineCoreOutput) -> None: ...

    def draining(self) -> None: ...

    def failed(self, error: GatewayError, *, retryable: bool) -> None: ...


class SequenceListener(Protocol):
    """Is notified when a sequence starts, ends or fails, or its engine drains."""

    def started(self, sequence: EngineSequence) -> None:
        """The engine sent the first output."""

    def ended(self, sequence: EngineSequence) -> None:
        """The output is complete. After a stop string or a cut, and for a sink that is satisfied, the engine still runs
        the request: abort it."""

    def draining(self, sequence: EngineSequence) -> None:
        """The sequence's engine will shut down; another one may continue it."""

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None: ...


class DiscardedText:
    """Tokens add no text and do not count."""

    plain = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        return TextDelta("", 0)

    def boundary(self) -> TextDelta:
        return TextDelta("", 0)

    def finish(self, token_ids: Sequence[int], *, stop_token: bool) -> TextDelta:
        return TextDelta("", 0)


class OutputProcessor:
    """Processes the output of one sequence; the `OutputSink` of its engine request.

    After a failover the next engine's output continues the same sequence.

    `received`: all output token ids from the engine, so that another engine can resume after them.
    `num_tokens`: output tokens for the usage; those cut off by a stop string do not count.
    """

    __slots__ = (
        "_discards",
        "_held_ids",
        "_held_logprobs",
        "_is_parsed",
        "_listener",
        "_markers",
        "_num_unsent_markers",
        "_plain",
        "_prompt_logprobs",
        "_sink",
        "_stream",
        "_wants_tokens",
        "finish_reason",
        "num_cached_tokens",
        "num_tokens",
        "received",
        "times",
    )

    def __init__(
        self,
        stream: TextStream | None,
        sink: DeltaSink,
        listener: SequenceListener,
        *,
        wants_tokens: bool,
        markers: frozenset[int] | None = None,
    ) -> None:
        """Without a `stream` only the prompt is scored: the output is discarded, and its finish reason is "length".
        `wants_tokens`: deltas have token ids and log probabilities. `markers`: tokens that the sink gets as ids instead
        of text, for an output that is parsed."""
        self._discards = stream is None  # only the prompt is scored
        self._stream: TextStream | DiscardedText = stream or DiscardedText()
        self._sink = sink
        self._listener = listener
        self._wants_tokens = wants_tokens
        self._is_parsed = markers is not None
        self._markers = markers or frozenset()
        self._num_unsent_markers = 0  # since the last delta
        self._plain = None if wants_tokens or self._is_parsed else self._stream.plain  # sends text as it comes
        self._held_ids: list[int] = []  # received, but a stop string may still cut them off
        self._held_logprobs: list[TokenLogprobs] = []  # of these tokens
        self._prompt_logprobs: LogprobColumns | None = None  # None: none have come since the last delta
        self.received = array("I")
        self.num_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens from the prefix cache of the engine that sent the first token
        self.times: dict[EventType, float] = {}  # of the engines' events, by their clocks, the first of each kind
        self.finish_reason: FinishName | None = None  # None until the output ends

    @property
    def reasoning_tokens(self) -> int | None:
        return self._sink.reasoning_tokens

    def token(self, token_id: int) -> None:
        if not self.received:
            self._listener.started(self)
        self.received.append(token_id)
        if self._plain is not None:
            self.num_tokens += 1
            if text := self._plain.push_token(token_id):
                self._sink.text(text)
            return
        if self._wants_tokens:
            self._held_ids.append(token_id)
        if token_id in self._markers:
            self._mark(token_id)
            return
        delta = self._stream.push((token_id,))
        self.num_tokens += delta.num_tokens
        if self._wants_tokens or self._is_parsed or delta.stop_string is not None:
            self._emit(delta, None, None)
        elif delta.text:
            self._sink.text(delta.text)

    def output(self, output: EngineCoreOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            self._listener.failed(self, GrammarFailed(output.error), retryable=False)
            return
        if output.num_cached_tokens is not None and not self.received:
            self.num_cached_tokens = output.num_cached_tokens
        for event in output.events:
            self.times.setdefault(event.type, event.timestamp)
        if output.prompt_logprobs:
            self._prompt_logprobs = self._prompt_logprobs or LogprobColumns()
            self._prompt_logprobs.extend(output.prompt_logprobs)
        token_ids = output.new_token_ids
        if not self.received and (token_ids or output.is_finished):
            self._listener.started(self)
        self.received.extend(token_ids)
        if self._wants_tokens:
            self._held_ids += token_ids
            self._held_logprobs += output.logprobs
        if self._markers:
            token_ids = self._push_up_to_last_marker(token_ids)
            if self.finish_reason is not None:  # by a stop string or the sink
                return
        if not output.is_finished:
            delta = self._stream.push(token_ids)
        else:
            delta = self._stream.finish(token_ids, stop_token=output.finish_reason is FinishReason.STOP)
        self.num_tokens += delta.num_tokens
        if self._discards and output.finish_reason in (FinishReason.STOP, FinishReason.COMPLETE):
            self._emit(delta, FinishReason.LENGTH, None)
        elif token_ids or output.is_finished:
            self._emit(delta, output.finish_reason, output.public_stop_reason)

    def cut(self, finish_reason: FinishReason, stop_reason: str) -> None:
        """End the output here, with all text so far."""
        delta = self._stream.finish((), stop_token=False)
        self.num_tokens += delta.num_tokens
        self._emit(delta, finish_reason, stop_reason)

    def draining(self) -> None:
        self._listener.draining(self)

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        if not self.received:
            self._prompt_logprobs = None  # the next engine sends all of them again
        self._listener.failed(self, error, retryable=retryable)

    def _push_up_to_last_marker(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Process the tokens up to the last marker. Return the rest."""
        start = 0
        for end, token_id in enumerate(token_ids):
            if token_id in self._markers and self.finish_reason is None:
                if end > start:
                    delta = self._stream.push(token_ids[start:end])
                    self.num_tokens += delta.num_tokens
                    self._emit(delta, None, None)
                start = end + 1
                if self.finish_reason is None:
                    self._mark(token_id)
        return token_ids[start:]

    def _mark(self, token_id: int) -> None:
        delta = self._stream.boundary()
        self.num_tokens += delta.num_tokens
        self._emit(delta, None, None)
        if self.finish_reason is None:
            self.num_tokens += 1
            self._num_unsent_markers += 1
            self._sink.marker(token_id)
            if self._sink.is_satisfied:
                self._emit(TextDelta("", 0), FinishReason.STOP, None)

    def _emit(self, delta: TextDelta, finish_reason: FinishReason | None, stop_reason: int | str | None) -> None:
        emitted = Delta(delta.text)
        if self._wants_tokens:
            emitted.token_ids, emitted.logprobs = self._release(self._num_unsent_markers + delta.num_tokens)
        self._num_unsent_markers = 0
        emitted.num_tokens = delta.num_tokens if self._is_parsed else 0
        if delta.stop_string is not None:
            emitted.finish_reason, emitted.stop_reason = "stop", delta.stop_string
        elif finish_reason is not None:
            emitted.finish_reason, emitted.stop_reason = _NAMES[finish_reason], stop_reason
        if emitted.text or emitted.token_ids or emitted.num_tokens or emitted.finish_reason is not None:
            emitted.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs or (), None
            emitted.num_cached_tokens = self.num_cached_tokens
            self._sink.delta(emitted)
        if emitted.finish_reason is not None:
            self.finish_reason = emitted.finish_reason
            self._listener.ended(self)
        elif self._is_parsed and self._sink.is_satisfied:
            self._emit(TextDelta("", 0), FinishReason.STOP, None)

    def _release(self, num_tokens: int) -> tuple[list[int], list[TokenLogprobs]]:
        """Remove the oldest held tokens, which nothing can cut off any more."""
        ids, self._held_ids = self._held_ids[:num_tokens], self._held_ids[num_tokens:]
        logprobs, self._held_logprobs = self._held_logprobs[:num_tokens], self._held_logprobs[num_tokens:]
        return ids, logprobs
