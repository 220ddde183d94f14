"""The offline `LLM`'s results, with vLLM's names."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    data: "Tensor"  # [values] float32, or [tokens, values] with a row for each token


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    probs: list[float]  # by label

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[T]):
    """A finished pooled request and its result."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
