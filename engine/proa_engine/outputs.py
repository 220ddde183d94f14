"""The offline `LLM`'s results, with vLLM's names."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at a position. `rank` 1 is the most likely token; a token of `logprob_token_ids` has
    its number there, unless it was sampled."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice, so far. `token_ids` and `logprobs` end where `text` does, also where a stop string cut it off."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None  # one for each of token_ids, if requested
    finish_reason: str | None  # stop, length, repetition, abort or error
    stop_reason: int | str | None  # the stop token or stop string

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and the outputs of its choices so far."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: (
        list[dict[int, Logprob] | None] | None
    )  # one for each prompt token, None for the first; if requested
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens found in the prefix cache
