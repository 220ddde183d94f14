"""GrammarCursor: the free and constrained parts of an output."""

from copy import copy
from typing import Any

import pytest

from proa.contract import Grammar
from proa_engine.core.grammar import GrammarCursor, Part

OPEN, CLOSE, THINK = 90, 91, 92


class CountingMatcher:
    """Accepts the tokens 1, 2 and 3 in this order and nothing more."""

    def __init__(self) -> None:
        self.num_tokens = 0

    @property
    def is_accepting(self) -> bool:
        return self.is_done

    @property
    def is_done(self) -> bool:
        return self.num_tokens == 3

    def accept(self, token_id: int) -> bool:
        self.num_tokens += 1
        return token_id == self.num_tokens

    @property
    def error(self) -> str:
        return ""

    def forced(self) -> list[int]:
        return []

    def restart(self) -> None:
        self.num_tokens = 0

    def copy(self) -> "CountingMatcher":
        return copy(self)


def cursor(**fields: Any) -> GrammarCursor:
    return GrammarCursor(Grammar(text="x", **fields), CountingMatcher())


def accepted(cursor: GrammarCursor, *token_ids: int) -> int:
    """How many tokens are accepted, up to the one that completes the grammar."""
    for count, token_id in enumerate(token_ids):
        if cursor.is_complete or not cursor.accept(token_id):
            return count
    return len(token_ids)


def test_without_start_after_the_first_token_is_constrained() -> None:
    assert accepted(cursor(), 1, 2, 3, 4) == 3
    assert accepted(cursor(), 2) == 0


def test_the_grammar_begins_with_the_token_after_start_after() -> None:
    one = cursor(start_after=[OPEN, CLOSE])
    assert accepted(one, 50, 1, CLOSE, 1, 2) == 5
    assert not one.is_complete
    assert accepted(one, 3, 4) == 1
    assert one.is_complete


@pytest.mark.parametrize(
    ("token_ids", "count"),
    [
        ((1, 2, 3, 4), 3),
        ((THINK, 50, CLOSE, 1, 2, 3, 4), 6),
        ((50,), 0),
        ((THINK, 50, CLOSE, CLOSE), 3),
    ],
)
def test_the_first_token_says_whether_the_output_begins_free(token_ids: tuple[int, ...], count: int) -> None:
    assert accepted(cursor(start_after=[CLOSE], free_if_first=[THINK]), *token_ids) == count


def test_a_grammar_that_repeats_makes_the_output_free_again_and_never_completes() -> None:
    one = cursor(start_after=[OPEN], repeats=True)
    assert accepted(one, 50, OPEN, 1, 2, 3, 51, OPEN, 1, 2, 3) == 10
    assert one.part is Part.FREE
    assert accepted(one, 1, OPEN, 2) == 2
