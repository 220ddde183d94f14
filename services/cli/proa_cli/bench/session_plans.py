"""What the sessions of a benchmark are like: how many turns, what each adds, how long clients wait between them.

A session's prompt is its own text and not the model's answers, so that every server gets the same prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np


class Distribution(Protocol):
    def draw(self, draw: np.random.Generator) -> float: ...


@dataclass(frozen=True, slots=True)
class Evenly:
    """Between two numbers, which may be equal."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high < math.inf:
            raise ValueError(f"{self}: the first number must be at least 0 and at most the second")

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}:{self.high:g}"

    def draw(self, draw: np.random.Generator) -> float:
        return float(draw.uniform(self.low, self.high))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Many small numbers and few large ones. `sigma`: of their natural logarithms."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        if not (0 < self.median < math.inf and 0 <= self.sigma < math.inf):
            raise ValueError(f"{self}: the median must be above 0, sigma at least 0")

    def __str__(self) -> str:
        return f"lognormal:{self.median:g}:{self.sigma:g}"

    def draw(self, draw: np.random.Generator) -> float:
        return float(draw.lognormal(math.log(self.median), self.sigma))


@dataclass(frozen=True, slots=True)
class Agents:
    """Seconds between an agent's turns, while tools run: mostly short, at times a build or a user
    (vllm-project/router, issue 285)."""

    def __str__(self) -> str:
        return "agents"

    def draw(self, draw: np.random.Generator) -> float:
        kind = draw.choice(len(_AGENT_GAPS), p=[share for share, _ in _AGENT_GAPS])
        return _AGENT_GAPS[kind][1].draw(draw)


_AGENT_GAPS: Final = ((0.86, Evenly(0.1, 1)), (0.09, Evenly(1, 10)), (0.05, Evenly(10, 300)))


def parse_distribution(text: str) -> Distribution:
    """`N`, `LOW:HIGH`, `lognormal:MEDIAN:SIGMA` or `agents`. Raises `ValueError`."""
    kind, *numbers = text.split(":") if text.startswith("lognormal:") else ["evenly", *text.split(":")]
    if text == "agents":
        return Agents()
    try:
        values = [float(each) for each in numbers]
    except ValueError:
        values = []
    match kind, values:
        case "lognormal", [median, sigma]:
            return LogNormal(median, sigma)
        case "evenly", [value]:
            return Evenly(value, value)
        case "evenly", [low, high]:
            return Evenly(low, high)
    raise ValueError(f"{text} is not N, LOW:HIGH, lognormal:MEDIAN:SIGMA or agents")


def _number_and_count(text: str) -> tuple[float, int]:
    """Of `NUMBER:COUNT`; zeros if the text is something else."""
    number, _, count = text.partition(":")
    try:
        return float(number), int(count)
    except ValueError:
        return 0.0, 0


@dataclass(frozen=True, slots=True)
class OneShots:
    """Prompts of no session beside them: `rate` a second, as a Poisson process, of `length` tokens."""

    rate: float
    length: int

    def __str__(self) -> str:
        return f"{self.rate:g}:{self.length}"


def parse_one_shots(text: str) -> OneShots:
    """`RATE:TOKENS`. Raises `ValueError`."""
    shots = OneShots(*_number_and_count(text))
    if not (0 < shots.rate < math.inf and shots.length > 0):
        raise ValueError(f"{text} is not RATE:TOKENS, both above zero")
    return shots


@dataclass(frozen=True, slots=True)
class Subagents:
    """A turn calls a sub-agent with a probability of `share`. It has a conversation of `turns` turns, and the next turn
    comes after it."""

    share: float
    turns: int

    def __str__(self) -> str:
        return f"{self.share:g}:{self.turns}"


def parse_subagents(text: str) -> Subagents:
    """`SHARE:TURNS`. Raises `ValueError`."""
    agents = Subagents(*_number_and_count(text))
    if not (0 < agents.share <= 1 and agents.turns > 0):
        raise ValueError(f"{text} is not SHARE:TURNS, a share of at most 1 and both above zero")
    return agents


@dataclass(frozen=True, slots=True)
class Turn:
    """`new_tokens`: of the prompt, behind that of the turn before. `gap`: seconds between the turn's end, or that of
    its sub-agent, and the next turn. `subagent`: the turns of the sub-agent that it calls; empty: it calls none."""

    new_tokens: int
    output_tokens: int
    gap: float
    subagent: Sequence["Turn"] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """`shared_tokens`: of the text with which all sessions begin. `first`: tokens behind it in a first turn. `growth`:
    tokens that a later turn adds, the answer to the turn before among them. Lengths are at least 1."""

    turns: Distribution
    shared_tokens: int
    first: Distribution
    growth: Distribution
    outputs: Distribution
    gaps: Distribution
    subagents: Subagents | None = None

    def plan(self, draw: np.random.Generator, most_turns: int) -> Sequence[Turn]:
        """One session, of at most `most_turns` turns, those of sub-agents among them."""
        turns = list[Turn]()
        for index in range(_length(self.turns, draw)):
            if most_turns <= 0:
                break
            most_turns -= 1
            turn = self._turn(index, draw)
            if self.subagents is not None and draw.random() < self.subagents.share:
                count = min(self.subagents.turns, most_turns)
                turn = replace(turn, subagent=[self._turn(each, draw) for each in range(count)])
                most_turns -= count
            turns.append(turn)
        return turns

    def output_length(self, draw: np.random.Generator) -> int:
        return _length(self.outputs, draw)

    def _turn(self, index: int, draw: np.random.Generator) -> Turn:
        return Turn(
            new_tokens=_length(self.growth if index else self.first, draw),
            output_tokens=_length(self.outputs, draw),
            gap=self.gaps.draw(draw),
        )


def _length(distribution: Distribution, draw: np.random.Generator) -> int:
    return max(1, round(distribution.draw(draw)))
