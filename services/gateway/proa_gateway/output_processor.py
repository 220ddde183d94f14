"""OutputProcessor: turns one sequence's tokens into text as the engine sends them, and ends it at a stop string.

The token it is called with is in the client's socket when the call returns, unless somebody is slow. Knows nothing
of engines' choice, gRPC, HTTP or JSON.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from proa.text import TextDelta, TextStream
from proa_gateway.errors import GatewayError, InternalError
from proa_gateway.types import EngineOutput, FinishReason, TokenLogprobs

FinishName = Literal["stop", "length", "abort"]
_NAMES: dict[FinishReason, FinishName] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


@dataclass(slots=True)
class Delta:
    """What became certain of a sequence since the last one."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # only where the consumer wants tokens; likewise logprobs
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # whole, on the first delta
    finish_reason: FinishName | None = None
    stop_reason: int | str | None = None  # the stop token or string

    def merge(self, later: "Delta") -> None:
        """Makes this one say all that both say, but for the text: many merges of that are the caller's to do well."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class Consumer(Protocol):
    """Whom the text is for. Calls must return at once."""

    def text(self, text: str) -> None:
        """Text, and nothing else to say."""

    def delta(self, delta: Delta) -> None: ...


class SequenceOwner(Protocol):
    """Who looks after a sequence's life."""

    def started(self, sequence: "OutputProcessor") -> None:
        """The first output came."""

    def ended(self, sequence: "OutputProcessor") -> None:
        """The last delta has been given. A sequence cut at a stop string is still running in its engine."""

    def failed(self, sequence: "OutputProcessor", error: GatewayError, *, retryable: bool) -> None: ...


class OutputProcessor:
    """One output sequence; the `OutputSink` of its engine request.

    `num_tokens` are those that stand for the text: what the usage counts. `received` also holds those that were cut
    off, and is how far the engine is; another engine can go on from there, and its outputs come here like the first's.
    Without a `stream` only the prompt matters: the output is dropped, and ends for its length.
    """

    __slots__ = (
        "_consumer",
        "_held_ids",
        "_held_logprobs",
        "_owner",
        "_plain_push",
        "_prompt_logprobs",
        "_stream",
        "_wants_tokens",
        "finish_reason",
        "num_cached_tokens",
        "num_tokens",
        "received",
    )

    def __init__(
        self, stream: TextStream | None, consumer: Consumer, owner: SequenceOwner, *, wants_tokens: bool
    ) -> None:
        self._stream = stream
        self._consumer = consumer
        self._owner = owner
        self._wants_tokens = wants_tokens
        self._plain_push = stream.plain.push if stream and stream.plain is not None and not wants_tokens else None
        self._held_ids: list[int] = []  # received, but not yet sure to stay
        self._held_logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self.received = array("I")
        self.num_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, by the engine that gave the first token
        self.finish_reason: FinishName | None = None

    def token(self, token_id: int) -> None:
        if not self.received:
            self._owner.started(self)
        self.received.append(token_id)
        if self._plain_push is not None:
            self.num_tokens += 1
            if text := self._plain_push((token_id,)):
                self._consumer.text(text)
            return
        if self._stream is None:
            return
        if self._wants_tokens:
            self._held_ids.append(token_id)
        delta = self._stream.push((token_id,))
        self.num_tokens += delta.num_tokens
        if self._wants_tokens or delta.stop_string is not None:
            self._give(delta, None, None)
        elif delta.text:
            self._consumer.text(delta.text)

    def output(self, output: EngineOutput) -> None:
        if output.finish_reason is FinishReason.ERROR:
            self._owner.failed(self, InternalError(f"the engine failed: {output.error}"), retryable=False)
            return
        if output.num_cached_tokens is not None and not self.received:
            self.num_cached_tokens = output.num_cached_tokens
        self._prompt_logprobs += output.prompt_logprobs
        token_ids = output.new_token_ids
        if not self.received and (token_ids or output.finish_reason is not None):
            self._owner.started(self)
        self.received.extend(token_ids)
        if self._wants_tokens:
            self._held_ids += token_ids
            self._held_logprobs += output.logprobs
        delta = self._push(token_ids, output.finish_reason)
        self.num_tokens += delta.num_tokens
        if self._stream is None and output.finish_reason is FinishReason.STOP:
            self._give(delta, FinishReason.LENGTH, None)
        elif token_ids or output.finish_reason is not None:
            self._give(delta, output.finish_reason, output.stop_reason)

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        if not self.received:
            self._prompt_logprobs.clear()  # the next engine is asked for all of them
        self._owner.failed(self, error, retryable=retryable)

    def _push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> TextDelta:
        if self._stream is None:
            return TextDelta("", 0)
        if finish_reason is None:
            return self._stream.push(token_ids)
        return self._stream.finish(token_ids, stop_token=finish_reason is FinishReason.STOP)

    def _give(self, delta: TextDelta, finish_reason: FinishReason | None, stop_reason: int | None) -> None:
        given = Delta(delta.text, *self._take(delta.num_tokens))
        if delta.stop_string is not None:
            given.finish_reason, given.stop_reason = "stop", delta.stop_string
        elif finish_reason is not None:
            given.finish_reason, given.stop_reason = _NAMES[finish_reason], stop_reason
        if given.text or given.token_ids or given.finish_reason is not None:
            given.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
            self._consumer.delta(given)
        if given.finish_reason is not None:
            self.finish_reason = given.finish_reason
            self._owner.ended(self)

    def _take(self, num_tokens: int) -> tuple[list[int], list[TokenLogprobs]]:
        """The oldest held tokens, which are now sure to stay."""
        ids, self._held_ids = self._held_ids[:num_tokens], self._held_ids[num_tokens:]
        logprobs, self._held_logprobs = self._held_logprobs[:num_tokens], self._held_logprobs[num_tokens:]
        return ids, logprobs
