"""Deltas: the output of a sequence as text, and the interfaces that pass it on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from proa.contract import EngineCoreOutput, EventType, TokenLogprobs
from proa_gateway.errors import GatewayError

FinishName = Literal["stop", "length", "abort", "repetition"]


@dataclass(slots=True)
class Delta:
    """Output of a sequence since its previous delta, without what a stop string may still cut off."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty unless the sink's response has them, like `logprobs`
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # all of them, in the first delta
    finish_reason: FinishName | None = None
    stop_reason: int | str | None = None  # the stop token or stop string; None for an end-of-sequence token
    num_tokens: int = 0  # of `text`, if the sequence has `markers`
    num_cached_tokens: int = 0  # of the prompt

    def merge(self, later: "Delta") -> None:
        """Append `later`, except its text: repeated concatenation takes quadratic time, so callers join texts."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
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
    def times(self) -> Mapping[EventType, float]:
        """When each of these happened first, by the engine's clock in Unix seconds."""
        ...

    @property
    def finish_reason(self) -> FinishName | None: ...

    def token(self, token_id: int) -> None: ...

    def output(self, output: EngineCoreOutput) -> None: ...

    def failed(self, error: GatewayError, *, retryable: bool) -> None: ...


class SequenceListener(Protocol):
    """Is notified when a sequence starts, ends or fails."""

    def started(self, sequence: EngineSequence) -> None:
        """The engine sent the first output."""

    def ended(self, sequence: EngineSequence) -> None:
        """The output is complete. After a stop string, and for a sink that is satisfied, the engine still runs the
        request: abort it."""

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None: ...
