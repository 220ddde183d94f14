"""N-gram drafts on the CPU against their definition, and which of them are accepted."""

import random

import pytest
import torch

from proa_engine.kernels.sampling.drafts import NONE, accept_drafts, propose_ngrams
from support.ngrams import drafts_of


def propose(rows: list[list[int]], counts: list[int], width: int, min_ngram: int, max_ngram: int) -> list[list[int]]:
    """Drafts of rows that may have `counts` of them. Also checks the other effects, and that padding has none."""
    longest = max(map(len, rows))
    table = torch.full((len(rows) + 1, longest + width), 10**9, dtype=torch.int32)  # behind a row's end lies anything
    lengths = torch.zeros(len(rows) + 1, dtype=torch.int64)
    slots = list(range(len(rows), 0, -1))
    for slot, row in zip(slots, rows, strict=True):
        table[slot, : len(row)] = torch.tensor(row)
        lengths[slot] = len(row)
    before, drafts = table.clone(), torch.full((len(rows) + 1, width), -7)
    ends = [len(row) + count + slot % 2 for slot, row, count in zip(slots, rows, counts, strict=True)]
    step = torch.tensor([[*slots, 0], [*ends, 0], [*(1 + count for count in counts), 0]])
    propose_ngrams(step, table, lengths, drafts, min_ngram=min_ngram, max_ngram=max_ngram)
    assert step[1].tolist() == [*(len(row) + count for row, count in zip(rows, counts, strict=True)), 0]
    assert (drafts[0] == -7).all()
    assert torch.equal(table[0], before[0])
    for slot, row, count in zip(slots, rows, counts, strict=True):
        assert table[slot].tolist() == [
            *row,
            *drafts[slot, :count].clamp(min=0).tolist(),
            *before[slot, len(row) + count :].tolist(),
        ]
    return drafts[slots].tolist()


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


def test_a_row_that_computes_a_part_of_its_prompt_keeps_its_end() -> None:
    rows, drafts = torch.tensor([[0], [4], [1]]), torch.zeros(1, 2, dtype=torch.int64)
    propose_ngrams(rows, torch.zeros(1, 12, dtype=torch.int32), torch.tensor([9]), drafts, min_ngram=1, max_ngram=2)
    assert rows.tolist() == [[0], [4], [1]]
    assert drafts.tolist() == [[NONE, NONE]]


def test_drafts_are_accepted_up_to_the_first_that_differs_from_its_sample() -> None:
    drafts = torch.tensor([[5, 6, 7], [NONE] * 3, [5, 6, NONE], [1, 2, 3], [9, NONE, NONE]])
    samples = torch.tensor([5, 6, 7, 8, 4, 5, 8, 9, 9])  # of slots 0, 1, 2 and 4, which has one only
    slots, first = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 4]), torch.tensor([0, 4, 5, 8])
    lengths = torch.full((5,), 10)
    assert accept_drafts(samples, slots, first, drafts, lengths).tolist() == [[3, 3], [0, 0], [1, 2], [1, 1]]
    assert lengths.tolist() == [14, 11, 12, 10, 12]
