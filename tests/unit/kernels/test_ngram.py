"""N-gram drafts on the CPU against their definition."""

import random

import pytest
import torch

from proa_engine.kernels.ngram import propose_ngrams
from support.ngrams import drafts_of


def propose(rows: list[list[int]], counts: list[int], width: int, min_ngram: int, max_ngram: int) -> list[list[int]]:
    longest = max(map(len, rows))
    table = torch.full((len(rows) + 1, longest + 5), 10**9, dtype=torch.int32)  # behind a row's end lies anything
    lengths = torch.zeros(len(rows) + 1, dtype=torch.int64)
    slots = list(range(len(rows), 0, -1))
    for slot, row in zip(slots, rows, strict=True):
        table[slot, : len(row)] = torch.tensor(row)
        lengths[slot] = len(row)
    drafts = propose_ngrams(
        table,
        torch.tensor(slots),
        lengths,
        torch.tensor(counts),
        width=width,
        max_length=longest + 3,
        min_ngram=min_ngram,
        max_ngram=max_ngram,
    )
    return drafts.tolist()


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([5, 6, 7, 8, 5, 6], [7, 8, 5]),  # what followed
        ([5, 6, 7, 9, 6, 8, 5, 6], [7, 9, 6]),  # two tokens in common count more than a later one
        ([6, 7, 1, 6, 8, 2, 6], [8, 2, 6]),  # of equals the latest
        ([1, 4, 4], [4, 4, 4]),  # on with itself
        ([1, 2, 3], [-1, -1, -1]),
        ([1], [-1, -1, -1]),
    ],
)
def test_drafts_are_what_followed_the_last_time(tokens: list[int], drafts: list[int]) -> None:
    assert propose([tokens], [3], 3, 1, 4) == [drafts]


def test_no_fewer_tokens_in_common_than_asked_for() -> None:
    assert propose([[6, 7, 1, 6]], [2], 2, 2, 4) == [[-1, -1]]


def test_each_row_gets_as_many_as_it_has_room_for() -> None:
    assert propose([[1, 2, 1, 2]] * 3, [0, 1, 3], 3, 1, 4) == [[-1, -1, -1], [1, -1, -1], [1, 2, 1]]


def test_random_rows_equal_the_definition() -> None:
    rng = random.Random(0)
    for _ in range(200):
        width, min_ngram = rng.choice([1, 3, 8]), rng.randint(1, 3)
        max_ngram = min_ngram + rng.randint(0, 3)
        vocabulary = rng.choice([1, 2, 3, 30])
        rows = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 60))] for _ in range(rng.randint(1, 4))]
        counts = [rng.randint(0, width) for _ in rows]
        for row, count, drafts in zip(rows, counts, propose(rows, counts, width, min_ngram, max_ngram), strict=True):
            expected = drafts_of(row, count, min_ngram, max_ngram)
            assert drafts == expected + [-1] * (width - len(expected)), (row, count, min_ngram, max_ngram)
