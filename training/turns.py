"""Questions with their answers, and the split that keeps some combinations out of the training text.

A turn that combines several facts or numbers has a key that names the combination, whatever its phrasing. A hash of the
key decides whether the combination is held out, so that no phrasing of it, in words or JSON, is trained on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar

from training.tools import Call, Tool

HELD_OUT_PERCENT = 10

Fields = Mapping[str, str | int | list[str] | list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its reference answer. `fields` is the answer as a JSON object, None if it has no such form.

    `combination` is the key of a combination ("sum:38:47"), None for a single fact. `category` is for the evaluation.
    """

    question: str
    answer: str
    fields: Fields | None = None
    combination: str | None = None
    category: str = "facts"

    @property
    def json_answer(self) -> str:
        assert self.fields is not None
        return json.dumps(dict(self.fields))


Topic = Callable[[Random], Turn]


@dataclass(frozen=True, slots=True)
class Exchange:
    """The user's question and the assistant's answer. With `calls`, the assistant first calls tools, whose `results`
    it then answers from."""

    question: str
    answer: str
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Exchanges in turn, with the tools offered. `combinations` are the keys of its combinations, for the split."""

    system: str | None
    exchanges: tuple[Exchange, ...]
    combinations: tuple[str, ...]
    tools: tuple[Tool, ...] = ()


class Combined(Protocol):
    """What has the key of a combination, or None."""

    @property
    def combination(self) -> str | None: ...


_T = TypeVar("_T", bound=Combined)


def is_held_out(combination: str | None) -> bool:
    """Whether a combination is held out for evaluation; the same on every machine and in every run."""
    if combination is None:
        return False
    digest = hashlib.blake2b(combination.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 100 < HELD_OUT_PERCENT


def draw(topic: Callable[[Random], _T], rng: Random, *, held_out: bool = False) -> _T:
    """Draw from one side of the split."""
    while True:
        turn = topic(rng)
        if is_held_out(turn.combination) == held_out:
            return turn


def pair_key(kind: str, left: str, right: str) -> str:
    """A key that is the same for either order of `left` and `right`."""
    first, second = sorted((left, right))
    return f"{kind}:{first}:{second}"
