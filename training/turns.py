"""One question with its answer, and the split that keeps some combinations out of the training text.

A turn that joins several facts or numbers carries a key that names the combination, however it is phrased. A hash of
the key decides whether the combination is held out, so no phrasing of it, nor its JSON form, reaches the training text.
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
    """A question and its one right answer; `fields` is the answer as JSON, None where there is no such form.

    `combination` names what is joined ("sum:38:47"), None for a plain fact; `category` groups the evaluation.
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
    """Whether a combination is kept for evaluation. The same on every machine and in every run."""
    if combination is None:
        return False
    digest = hashlib.blake2b(combination.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 100 < HELD_OUT_PERCENT


def draw(topic: Topic, rng: Random, *, held_out: bool = False) -> Turn:
    """The topic's next turn from the wanted side of the split."""
    while True:
        turn = topic(rng)
        if is_held_out(turn.combination) == held_out:
            return turn


def pair_key(kind: str, left: str, right: str) -> str:
    """A key that does not depend on the order of the two."""
    first, second = sorted((left, right))
    return f"{kind}:{first}:{second}"
