"""Masks equal what a matcher accepts, token by token, in all parts of an output."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher

from proa.contract import Grammar, StructuredOutputsParams
from proa.grammar import lower
from proa_engine.core.grammar import GrammarCursor, GrammarMasks, MaskedSample
from proa_engine.grammar import LLGuidanceGrammars
from proa_engine.grammar.compiled import BYTES_PER_SECOND, MASK_SECONDS
from proa_engine.grammar.masks import LLGuidanceMatcher
from support.llguidance_engine import EOS, TOKENIZER, VOCAB_SIZE, cursor, llguidance_grammars, samples

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "x": {"enum": [1, "é"]}},
    "required": ["name", "age"],
}
GRAMMARS = [
    lower(StructuredOutputsParams(json=SCHEMA), {}).grammar.text,
    lower(StructuredOutputsParams(regex=r"(the|a) [a-z]{2,7}( \d{2,4})?"), {}).grammar.text,
    lower(StructuredOutputsParams(choice=["a", "ab", "the fox", "😀"]), {}).grammar.text,
    'start: "x" word+\nword: " " /[a-zé]+/\n',
]
THINK: int = TOKENIZER.encode("<think>").ids[0]
QUICK: int = TOKENIZER.encode(" quick").ids[0]


@pytest.fixture(scope="module")
def grammars() -> Iterator[LLGuidanceGrammars]:
    with llguidance_grammars() as made:
        yield made


def allowed(masks: GrammarMasks | None) -> dict[int, set[int]]:
    """By row."""
    assert masks is not None
    assert masks.bits.format == "i"
    words = np.frombuffer(masks.bits, np.uint32).reshape(len(masks.rows), -1)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return {row: set(of_row.nonzero()[0].tolist()) for row, of_row in zip(masks.rows, bits, strict=True)}


def accepted(state: GrammarCursor) -> set[int]:
    """What the cursor's matcher accepts, asked token by token."""
    assert isinstance(state.matcher, LLGuidanceMatcher)
    validate = state.matcher.state.validate_tokens
    return {token_id for token_id in range(TOKENIZER.get_vocab_size()) if validate([token_id])}


def is_mask_of(mask: set[int], state: GrammarCursor) -> bool:
    """Where the text can go on in one way alone, the mask has only the first token of the tokenizer's own encoding."""
    return mask == accepted(state) or (len(mask) == 1 and mask < accepted(state))


@pytest.mark.parametrize("parallel_rows", [2, 100])
def test_masks_equal_what_is_accepted_token_by_token(
    grammars: LLGuidanceGrammars, monkeypatch: pytest.MonkeyPatch, parallel_rows: int
) -> None:
    monkeypatch.setattr("proa_engine.grammar.masks.PARALLEL_ROWS", parallel_rows)
    monkeypatch.setattr("proa_engine.grammar.masks.SAMPLED_ROWS", 1)
    rng = random.Random(1)
    cursors = [cursor(grammars, text) for text in GRAMMARS]
    for _ in range(25):
        rows = [(3 * index + 1, each) for index, each in enumerate(cursors) if not each.is_complete]
        masks = allowed(grammars.fill(samples(dict(rows))))
        assert list(masks) == [row for row, _ in rows]
        for row, each in rows:
            assert is_mask_of(masks[row], each)
            assert (EOS in masks[row]) == each.matcher.is_accepting
            choices = masks[row] - {EOS}
            if not choices:
                cursors.remove(each)
            else:
                assert each.accept(rng.choice(sorted(choices)))


def test_forced_tokens_are_those_whose_masks_have_no_other(grammars: LLGuidanceGrammars) -> None:
    rng = random.Random(2)
    cursors = [cursor(grammars, text) for text in GRAMMARS]
    num_forced = 0
    for _ in range(40):
        cursors = [each for each in cursors if not each.is_complete]
        for each in cursors:
            forced = each.forced()
            (mask,) = allowed(grammars.fill(samples({0: each}))).values()
            assert not forced or mask == {forced[0]}
            num_forced += len(mask) == 1
            assert each.accept(rng.choice(sorted(mask - {EOS} or mask)))
    assert num_forced > 10


@pytest.mark.parametrize("text", ["a", "x"])
def test_nothing_is_forced_behind_a_complete_or_a_failed_output(grammars: LLGuidanceGrammars, text: str) -> None:
    state = cursor(grammars, 'start: "ab"')
    state.accept(TOKENIZER.encode(text).ids[0])
    while state.forced():
        assert state.accept(state.forced()[0])
    assert state.is_complete is (text == "a")


def test_nothing_is_forced_before_a_grammar_begins(grammars: LLGuidanceGrammars) -> None:
    free = Grammar(text='start: "ab"', start_after=(THINK,))
    assert not cursor(grammars, free).forced()
    first = cursor(grammars, replace(free, free_if_first=(QUICK,)))
    assert not first.forced()
    assert first.accept(QUICK)
    assert not first.forced()
    assert first.accept(THINK)
    assert first.forced()


def test_free_rows_may_not_end_and_repeating_ones_have_no_mask(grammars: LLGuidanceGrammars) -> None:
    once = cursor(grammars, Grammar(text=GRAMMARS[0], start_after=(THINK,)), stop_token_ids=(QUICK,))
    repeating = cursor(grammars, Grammar(text=GRAMMARS[0], start_after=(THINK,), repeats=True))

    assert grammars.fill(samples({4: repeating})) is None
    masks = allowed(grammars.fill(samples({2: once, 4: repeating})))
    assert list(masks) == [2]
    assert set(range(VOCAB_SIZE)) - masks[2] == {EOS, QUICK}


def test_first_row_may_also_become_free(grammars: LLGuidanceGrammars) -> None:
    first = cursor(grammars, Grammar(text=GRAMMARS[2], start_after=(THINK,), free_if_first=(QUICK, EOS)))
    bound = cursor(grammars, GRAMMARS[2])

    masks = allowed(grammars.fill(samples({0: first, 1: bound})))

    assert masks[0] == masks[1] | {QUICK, EOS}


def test_repeating_grammar_begins_anew(grammars: LLGuidanceGrammars) -> None:
    repeating = cursor(grammars, Grammar(text='start: "ab"', start_after=(THINK,), repeats=True))
    fills = []
    for token_id in [THINK, *TOKENIZER.encode("ab").ids, QUICK] * 2:
        fills.append(grammars.fill(samples({0: repeating})) is not None)
        assert repeating.accept(token_id)

    num_bound = len(TOKENIZER.encode("ab").ids)
    assert fills == [False, *[True] * num_bound, False] * 2


def test_masks_of_two_earlier_steps_stay(grammars: LLGuidanceGrammars) -> None:
    cursors = [cursor(grammars, text) for text in GRAMMARS[:3]]
    masks = [grammars.fill(samples({0: each})) for each in cursors]

    for one, other in pairwise(map(allowed, masks)):
        assert one != other
    assert all(is_mask_of(allowed(mask)[0], each) for mask, each in zip(masks, cursors, strict=True))


def test_slow_matcher_refuses_its_next_token_and_others_go_on(
    grammars: LLGuidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = cursor(grammars, GRAMMARS[0]), cursor(grammars, GRAMMARS[0])
    monkeypatch.setattr("proa_engine.grammar.masks.SLOW_SECONDS", -1.0)  # every fill is slow
    monkeypatch.setattr("proa_engine.grammar.masks.ROW_SECONDS", -1.0)  # and every row takes a second
    for _ in range(2):
        grammars.fill(samples({0: slow}))

    monkeypatch.undo()
    masks = allowed(grammars.fill(samples({0: slow, 1: fast})))

    assert is_mask_of(masks[1], fast)
    token_id = min(masks[1])
    assert not slow.accept(token_id)
    assert not slow.accept(EOS)
    assert not slow.is_complete
    assert fast.accept(token_id)


def test_fill_that_waits_for_a_core_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    fills = []

    class WaitingExecutor:
        def __init__(self, num_threads: int) -> None:
            self._executor = LLExecutor(num_threads)

        def unsafe_compute_mask_ptr(self, states: list[tuple[LLMatcher, int]], *buffer: int) -> None:
            fills.append(len(states))
            time.sleep(0.02)
            self._executor.unsafe_compute_mask_ptr(states, *buffer)

    monkeypatch.setattr("proa_engine.grammar.masks.LLExecutor", WaitingExecutor)
    monkeypatch.setattr("proa_engine.grammar.masks.PARALLEL_ROWS", 2)
    monkeypatch.setattr("proa_engine.grammar.masks.SAMPLED_ROWS", 1)
    with llguidance_grammars() as grammars:
        rows = [(number, cursor(grammars, GRAMMARS[0])) for number in range(2)]
        for _ in range(3):
            masks = allowed(grammars.fill(samples(dict(rows))))
            assert all(is_mask_of(masks[number], row) for number, row in rows)
    assert fills == [1, 1, 1]


@pytest.mark.parametrize("num_rows", [1, 20])
def test_slow_masks_are_counted_for_the_memory_of_their_grammar_and_quick_ones_are_not(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    num_fills, growth = 20, 0.001

    def fill_alone(rows: list[tuple[object, int]], *buffer: int) -> Iterator[tuple[object, float]]:
        yield from ((matcher, MASK_SECONDS + growth * (matcher is slow.matcher)) for matcher, _ in rows)

    monkeypatch.setattr("proa_engine.grammar.masks._fill_alone", fill_alone)
    with llguidance_grammars(max_samples=num_rows) as grammars:
        slow, *quick = [cursor(grammars, GRAMMARS[number > 0]) for number in range(num_rows)]
        before = [num_bytes(each) for each in (slow, *quick)]
        for _ in range(num_fills):
            grammars.fill(samples(dict(enumerate((slow, *quick)))))
        assert num_bytes(slow) - before[0] == pytest.approx(num_fills * growth * BYTES_PER_SECOND)
        assert [num_bytes(each) for each in quick] == before[1:]


def num_bytes(state: GrammarCursor) -> int:
    assert isinstance(state.matcher, LLGuidanceMatcher)
    return state.matcher._compiled.num_bytes


def test_masks_behind_draft_tokens_are_those_of_an_output_with_them(grammars: LLGuidanceGrammars) -> None:
    rng = random.Random(3)
    for text in GRAMMARS:
        alone, expected, draft_ids = cursor(grammars, text), list[set[int]](), list[int]()
        while len(draft_ids) < 6 and not alone.is_complete:
            expected.append(allowed(grammars.fill(samples({0: alone})))[0])
            draft_ids.append(rng.choice(sorted(expected[-1] - {EOS} or expected[-1])))
            assert alone.accept(draft_ids[-1])
        drafted = cursor(grammars, text)
        walked = [MaskedSample(2, place, each) for place, each in enumerate(drafted.walk([*draft_ids, EOS]))]
        masks = grammars.fill(walked)
        assert masks is not None
        assert masks.rows == (2,) * len(walked)
        assert masks.places == tuple(range(len(walked)))
        by_place = list(allowed(replace(masks, rows=masks.places)).values())
        assert by_place[: len(expected)] == expected
        assert drafted.accept(draft_ids[0]), "the output itself has not advanced"


def test_a_known_sample_has_a_mask_of_its_token(grammars: LLGuidanceGrammars) -> None:
    bound = cursor(grammars, GRAMMARS[0])
    masks = allowed(grammars.fill([MaskedSample(1, 0, QUICK), MaskedSample(2, 0, bound)]))
    assert masks[1] == {QUICK}
    assert is_mask_of(masks[2], bound)


def test_nothing_is_walked_behind_a_draft_token_that_the_grammar_refuses(grammars: LLGuidanceGrammars) -> None:
    a, b = (TOKENIZER.encode(letter).ids[0] for letter in "ab")
    state = cursor(grammars, 'start: "abab"')
    assert len(list(state.walk([a, b, b, a]))) == 3
    assert len(list(state.walk([a, b, a, b, a]))) == 4, "the last one completes the grammar"


def test_slow_masks_behind_draft_tokens_are_charged_to_the_output(
    grammars: LLGuidanceGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = TOKENIZER.encode("a").ids[0]
    slow = cursor(grammars, 'start: "a" /[a-z]+/')
    monkeypatch.setattr("proa_engine.grammar.masks.SLOW_SECONDS", -1.0)
    monkeypatch.setattr("proa_engine.grammar.masks.ROW_SECONDS", -1.0)
    for _ in range(2):
        grammars.fill([MaskedSample(0, place, each) for place, each in enumerate(slow.walk([a, a]))][1:])
    assert not slow.accept(a)


def test_matcher_at_its_limit_never_completes(grammars: LLGuidanceGrammars) -> None:
    """llguidance lets the output of a failed matcher end."""
    failed = cursor(grammars, 'start: "ab"')
    assert not failed.accept(QUICK)

    assert EOS in allowed(grammars.fill(samples({0: failed})))[0]
    assert not failed.accept(EOS)
    assert not failed.is_complete
    assert not failed.matcher.is_accepting
