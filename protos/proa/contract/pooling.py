"""PoolingParams: numbers computed from a prompt, instead of generated tokens."""

from dataclasses import dataclass
from enum import IntEnum


class PoolingTask(IntEnum):
    """What a pooled request asks for."""

    EMBED = 1  # one embedding of the prompt
    TOKEN_EMBED = 2  # one of each token
    CLASSIFY = 3  # one value for each of the model's labels
    TOKEN_LOGPROBS = 4  # the log probabilities of `score_token_ids` as the token after the prompt
    TOKEN_CLASSIFY = 5  # the values of the labels at each token

    @property
    def is_by_token(self) -> bool:
        """Whether there is a row of values for each token of the prompt."""
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Raises `ValueError` for fields that do not belong to the task."""

    task: PoolingTask
    dimensions: int | None = None  # leading values of each embedding that are kept; None: all
    # Embeddings get length 1, labels become probabilities. None: as the model's files say.
    use_activation: bool | None = None
    score_token_ids: tuple[int, ...] = ()
    second_segment_start: int | None = None  # prompt tokens before the second text of a pair; None: it is one text

    def __post_init__(self) -> None:
        if not isinstance(self.task, PoolingTask):
            raise ValueError(f"task must be one of {', '.join(task.name for task in PoolingTask)}")
        if self.dimensions is not None and self.task not in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED):
            raise ValueError("dimensions is only for embeddings")
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions}")
        if bool(self.score_token_ids) != (self.task is PoolingTask.TOKEN_LOGPROBS):
            raise ValueError("score_token_ids must be set for the log probabilities of tokens, and for nothing else")
        if self.use_activation is not None and self.task is PoolingTask.TOKEN_LOGPROBS:
            raise ValueError("use_activation does not apply to log probabilities")
