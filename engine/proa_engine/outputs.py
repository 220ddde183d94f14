"""What the offline `LLM` returns, with the names that vLLM's users know."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at a position; `rank` counts from 1, the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice, so far. Tokens and log probabilities are those whose text is in `text`: what a stop string cut off
    is not among them."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None  # one for each of token_ids, where asked for
    finish_reason: str | None  # stop, length, abort or error
    stop_reason: int | str | None  # the stop token or stop string

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and its choices, so far."""

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # one for each prompt token; the first has none
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # of the prompt, found in the prefix cache
