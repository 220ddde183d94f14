"""StepCosts: how long a step takes, estimated from the warm-up, for the watchdog's deadlines.

The time of a chunk of a prompt grows with its tokens, for the products with weights, and with its tokens times those
before them, for attention: on a CPU the last chunk of a long prompt takes a hundred times as long as its first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

from proa_engine.core.request import Request

# A row with fewer tokens counts as one of so many: it reads all keys and values before it too. The warm-up times rows
# of this length.
CONTEXT_ROW_TOKENS = 64


class RowSizes(NamedTuple):
    """The tokens of a step's rows of several tokens."""

    drafted: Sequence[int] = ()  # of a token and its drafts
    chunks: Sequence[int] = ()  # of prompts


class StepRows(NamedTuple):
    """What a step computes."""

    requests: Sequence[Request]  # of its rows: those of one token first, then those with drafts
    several: RowSizes
    encodes: bool  # whether it encodes images or audios

    def sizes(self) -> Iterable[int]:
        """Return each row's tokens."""
        drafted, chunks = self.several
        return chain(repeat(1, len(self.requests) - len(drafted) - len(chunks)), drafted, chunks)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds on the machine as it was during the warm-up. Upper bounds, except where attention is less efficient than
    in the warm-up."""

    step: float = 0.0  # a decode of one request, which reads every weight
    token: float = 0.0
    pair: float = 0.0  # a token and one of the tokens that it attends to
    images: float = 0.0  # the images or audios of one step

    def seconds(self, steps: Iterable[StepRows]) -> float:
        """Return the time of these steps, one after the other."""
        return sum(self._step_seconds(step) for step in steps)

    def _step_seconds(self, step: StepRows) -> float:
        num_tokens = sum(step.sizes())
        num_pairs = sum(
            max(size, CONTEXT_ROW_TOKENS) * request.num_computed_tokens  # counts the tokens of this step
            for size, request in zip(step.sizes(), step.requests, strict=True)
        )
        images = self.images if step.encodes else 0.0
        return max(self.step, self.token * num_tokens) + self.pair * num_pairs + images

    def longest_of(self, other: "StepCosts") -> "StepCosts":
        """Return the higher cost of each kind."""
        return StepCosts(
            max(self.step, other.step),
            max(self.token, other.token),
            max(self.pair, other.pair),
            max(self.images, other.images),
        )

    def of_stages(self, num_stages: int) -> "StepCosts":
        """Return the costs of a step that passes as many pipeline stages as expensive as this one."""
        return StepCosts(*(num_stages * each for each in (self.step, self.token, self.pair, self.images)))
