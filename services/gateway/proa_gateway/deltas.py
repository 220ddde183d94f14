"""Delta: output of a sequence, as text. DeltaSink: what receives it."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from proa.contract import TokenLogprobs

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
