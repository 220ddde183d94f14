"""Pipeline stages of a model: which layers each one computes.

The stages form a ring. The first one embeds tokens, and its layers are the model's first; the last stage sends what its
layers return back to the first one, which has the final norm and the LM head too, so that it alone samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` stages, and the layers `first` up to `end` that it computes; `end` None: all from `first` on."""

    index: int = 0
    count: int = 1
    first: int = 0
    end: int | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def __str__(self) -> str:
        last = "the last" if self.end is None else str(self.end - 1)
        return f"pipeline stage {self.index} of {self.count} computes layers {self.first} to {last}"

    def others(self, num_layers: int) -> frozenset[str]:
        """Return the numbers of the layers that other stages compute, as names of weights have them."""
        numbers = range(num_layers)
        return frozenset(map(str, numbers)) - frozenset(map(str, self.own(numbers)))

    def own(self, layers: Sequence[T]) -> Sequence[T]:
        """Return this stage's part of what a model has for each of its layers."""
        return layers[self.first : self.end]


WHOLE = Stage()


def cut(costs: Sequence[int], num_stages: int, *, first_cost: int = 0, num_first: int = 1) -> list[Stage]:
    """Divide layers with these costs among stages so that the most costly stage costs the least.

    `first_cost` is what the first stage computes besides its layers, `num_first` the number of layers that must be on
    it. Raises ValueError if there are fewer layers than stages.
    """
    most = len(costs) - num_first + 1
    if num_stages > most:
        raise ValueError(
            f"pipeline_parallel_size {num_stages} is more than the {most} parts into which the model's {len(costs)} "
            "layers can be cut"
        )
    before = [0, *accumulate(costs)]
    # By the end of the last stage so far: the cost of the most costly stage, and the stages' first layers.
    best = {end: (first_cost + before[end], [0]) for end in range(num_first, len(costs) + 1)}
    for _ in range(1, num_stages):
        longer: dict[int, tuple[int, list[int]]] = {}
        for end in range(min(best) + 1, len(costs) + 1):
            shorter = ((start, *best[start]) for start in best if start < end)
            longer[end] = min(
                (max(cost, before[end] - before[start]), [*starts, start]) for start, cost, starts in shorter
            )
        best = longer
    _, starts = best[len(costs)]
    ends = [*starts[1:], len(costs)]
    return [Stage(index, num_stages, start, end) for index, (start, end) in enumerate(zip(starts, ends, strict=True))]
