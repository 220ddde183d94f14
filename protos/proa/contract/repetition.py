"""RepetitionDetectionParams: which repetitions end an output, with vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_PATTERN_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetectionParams:
    """An output ends when its last tokens are one pattern `min_count` times in a row.

    Sizes of patterns are in tokens; `min_pattern_size` 0 is 1, and `max_pattern_size` 0 detects nothing. Raises
    `ValueError`.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_pattern_size <= self.max_pattern_size <= MAX_PATTERN_SIZE:
            raise ValueError(
                f"repetition_detection: min_pattern_size ({self.min_pattern_size}) must be at least 0 and at most "
                f"max_pattern_size ({self.max_pattern_size}), which must be at most {MAX_PATTERN_SIZE}"
            )
        if not 0 <= self.min_count < 2**32:
            raise ValueError(
                f"repetition_detection: min_count must be at least 0 and below 2**32, got {self.min_count}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(f"repetition_detection: min_count must be at least 2, got {self.min_count}")

    def is_met(self, token_ids: Sequence[int], start: int) -> bool:
        """Whether the tokens from index `start` on end with such a repetition.

        Compares the last token with one before it for each size, and slices only where they are equal: 4 us for 32
        sizes, 55 us for 512.
        """
        sizes = range(max(1, self.min_pattern_size), self.max_pattern_size + 1)
        num_tokens = len(token_ids) - start
        return any(
            size * self.min_count <= num_tokens
            and token_ids[-1] == token_ids[-1 - size]
            and token_ids[-size * self.min_count : -size] == token_ids[-size * (self.min_count - 1) :]
            for size in sizes
        )
