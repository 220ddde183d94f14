"""The offline `LLM`'s results, with vLLM's names, and how pooled ones are made.

Torch is imported on use: it must not be before the number of its threads is set.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from proa.contract import EngineCoreOutput, PoolingParams, PoolingTask, TokenLogprobs
from proa_engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

TASKS = {task.name.lower(): task for task in PoolingTask}


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at a position. `rank` 1 is the most likely token; a token of `logprob_token_ids` has
    its number there, unless it was sampled."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def logprobs_by_token(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The most likely tokens of a position, best first, and the chosen one. `tokenizer` None: without their texts."""

    def made(token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.decode_token(token_id) if tokenizer is not None else None)

    pairs = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    ranked = {token_id: made(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(pairs, start=1)}
    ranked[entry.token_id] = made(entry.token_id, entry.logprob, entry.rank)
    return ranked


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
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One for each prompt token, None for the first; if requested."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens found in the prefix cache


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


def params_of_task(task: str | None, params: PoolingParams | None) -> PoolingParams:
    """`params` for `task`, a name of `TASKS`, or as they are. Raises `ValueError` for neither or an unknown task."""
    if task is None:
        if params is None:
            raise ValueError(f"pooling_task must be one of {', '.join(TASKS)}")
        return params
    if task not in TASKS:
        raise ValueError(f"pooling_task must be one of {', '.join(TASKS)}, got {task}")
    return PoolingParams(task=TASKS[task]) if params is None else replace(params, task=TASKS[task])


def values_of(output: EngineCoreOutput) -> "Tensor":
    """[rows, values] float32"""
    import torch

    return torch.frombuffer(bytearray(output.pooled), dtype=torch.float32).view(output.num_pooled_rows, -1)


def make_output(
    request_id: str, prompt_token_ids: list[int], output: EngineCoreOutput, make: Callable[["Tensor"], T]
) -> PoolingRequestOutput[T]:
    """`make` gets [rows, values] float32."""
    return PoolingRequestOutput(
        request_id=request_id,
        outputs=make(values_of(output)),
        prompt_token_ids=prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pair each text of `data_1` with that of `data_2`, or its only one with all. Raises `ValueError` for other
    lengths."""
    first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second) or not first:
        raise ValueError(f"score needs one text and others, or as many as others, got {len(first)} and {len(second)}")
    return list(zip(first, second, strict=True))


def cosine_scores(
    first: Sequence[EmbeddingRequestOutput], second: Sequence[EmbeddingRequestOutput]
) -> list[ScoringRequestOutput]:
    """The cosines of the angles between embeddings."""
    import torch

    left, right = (
        torch.tensor([each.outputs.embedding for each in side], dtype=torch.float64) for side in (first, second)
    )
    return [
        PoolingRequestOutput(
            request_id=f"{a.request_id}_{b.request_id}",
            outputs=ScoringOutput(score),
            prompt_token_ids=[*a.prompt_token_ids, *b.prompt_token_ids],
            num_cached_tokens=a.num_cached_tokens + b.num_cached_tokens,
        )
        for a, b, score in zip(first, second, torch.cosine_similarity(left, right).tolist(), strict=True)
    ]
