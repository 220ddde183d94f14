"""A question with its answer, and the split that keeps some combinations out of the training text.

A turn that combines several facts or numbers has a key that names the combination, whatever its phrasing. A hash of the
key decides whether the combination is held out, so that no phrasing of it, in words or JSON, is trained on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

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


def is_held_out(combination: str | None) -> bool:
    """Whether a combination is held out for evaluation; the same on every machine and in every run."""
    if combination is None:
        return False
    digest = hashlib.blake2b(combination.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 100 < HELD_OUT_PERCENT


def draw(topic: Topic, rng: Random, *, held_out: bool = False) -> Turn:
    """Draw a turn of the topic from one side of the split."""
    while True:
        turn = topic(rng)
        if is_held_out(turn.combination) == held_out:
            return turn


def pair_key(kind: str, left: str, right: str) -> str:
    """A key that is the same for either order of `left` and `right`."""
    first, second = sorted((left, right))
    return f"{kind}:{first}:{second}"
