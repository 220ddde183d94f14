"""PrefillRate: how many prompt tokens a second the engine computes, measured on recent steps."""

from collections.abc import Iterable

_HALF_LIFE_TOKENS = 65_536  # after as many further tokens, a step counts half


class PrefillRate:
    """A mean over steps with chunks of prompts.

    Each step's time per token is weighted by the square of its tokens, so that steps with large chunks count almost
    alone: gateways ask how long a long prompt would take, and a step that adds 20 tokens to 200 decodes tells nothing
    about that. For the same reason steps age by tokens, not by time.
    """

    def __init__(self) -> None:
        self.tokens_per_second = 0.0  # 0 before the first step with a chunk has ended
        self._tokens = 0.0  # sum of the squares of steps' tokens
        self._seconds = 0.0  # sum of steps' seconds, each multiplied by the step's tokens

    def add(self, chunks: Iterable[int], seconds: float) -> None:
        """Count a step with chunks of so many tokens. Not if it took no time, because the clock was set back."""
        num_tokens = sum(chunks)
        if num_tokens and seconds > 0:
            kept = 0.5 ** (num_tokens / _HALF_LIFE_TOKENS)
            self._tokens = self._tokens * kept + num_tokens * num_tokens
            self._seconds = self._seconds * kept + num_tokens * seconds
            self.tokens_per_second = self._tokens / self._seconds
