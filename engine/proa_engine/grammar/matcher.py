"""LLGuidanceMatcher: the state of one output under a compiled grammar. Implements `core.grammar.Matcher`."""

from collections.abc import Sequence

from llguidance import LLMatcher

MAX_SLOW_SECONDS = 0.25  # of one output, beyond what its masks may take


class LLGuidanceMatcher:
    """`stop_token_ids` are the request's, which end its output as the model's end tokens do. `ignores_end`: the output
    does not end where it may, only where it must.

    A matcher fails for good at a token that is not allowed, at a limit of llguidance, and if its masks take too long.
    llguidance lets a failed output end, and accepts its end token: only the checks here keep it from being complete.
    """

    __slots__ = ("_compiled", "_is_too_slow", "_slow_seconds", "ignores_end", "state", "stop_token_ids")

    def __init__(self, compiled: LLMatcher, stop_token_ids: Sequence[int] = (), *, ignores_end: bool = False) -> None:
        self._compiled = compiled
        self._slow_seconds = 0.0
        self._is_too_slow = False
        self.state = compiled.deep_copy()
        self.stop_token_ids = stop_token_ids
        self.ignores_end = ignores_end

    @property
    def is_accepting(self) -> bool:
        return not self._is_failed and self.state.is_accepting()

    @property
    def is_done(self) -> bool:
        return self.state.is_stopped() and not self._is_failed

    def accept(self, token_id: int) -> bool:
        # most often one call instead of two: a failed matcher is stopped too
        if (self._is_too_slow or self.state.is_stopped()) and self._is_failed:
            return False
        return self.state.consume_token(token_id)

    def restart(self) -> None:
        self.state = self._compiled.deep_copy()

    def forced(self) -> Sequence[int]:
        tokens: list[int] = self.state.compute_ff_tokens()  # none if it is stopped or failed
        return tokens

    def charge(self, seconds: float) -> None:
        """Count the time by which computing a mask was too slow."""
        self._slow_seconds += seconds
        self._is_too_slow = self._slow_seconds > MAX_SLOW_SECONDS

    @property
    def _is_failed(self) -> bool:
        return self._is_too_slow or self.state.is_error()
