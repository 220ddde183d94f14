"""Requests that end when their output repeats itself."""

from itertools import pairwise
from typing import Any

import pytest

from proa.contract import EngineCoreRequest, FinishReason, RepetitionDetectionParams
from support.core import CoreRun, make_request
from support.fake_executor import generate
from support.fake_grammar import fake_grammar, generate_constrained

TWICE = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
PROMPT = (6, 2, 3, 3)  # ends with a repetition, which does not count


def request(**params: Any) -> EngineCoreRequest:
    return make_request(prompt=PROMPT, **{"max_tokens": 100, "repetition_detection": TWICE, **params})


def length_of_first_repetition(output: list[int], after: int = 0) -> int:
    """The number of tokens up to the second of two equal ones."""
    return next(index + 2 for index, (one, other) in enumerate(pairwise(output)) if one == other and index + 2 >= after)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 3, "accept": lambda num_drafts: num_drafts}])
def test_an_output_ends_with_its_first_repetition(settings: dict[str, Any], async_scheduling: bool) -> None:
    run = CoreRun(async_scheduling=async_scheduling, **settings)
    run.submit(request())
    run.finish()
    whole = generate(PROMPT, request().sampling_params, run.eos_token_ids, run.max_model_len)
    length = length_of_first_repetition(whole)
    assert length < len(whole)
    assert (run.tokens(), run.finish_reason()) == (whole[:length], FinishReason.REPETITION)


def test_nothing_is_detected_before_min_tokens() -> None:
    run = CoreRun()
    whole = generate(PROMPT, request().sampling_params, run.eos_token_ids, run.max_model_len)
    length = length_of_first_repetition(whole, after=length_of_first_repetition(whole) + 1)
    run.submit(request(min_tokens=length))
    run.finish()
    assert (run.tokens(), run.finish_reason()) == (whole[:length], FinishReason.REPETITION)


def test_the_output_of_another_engine_counts() -> None:
    run = CoreRun()
    whole = generate(PROMPT, request().sampling_params, run.eos_token_ids, run.max_model_len)
    length = length_of_first_repetition(whole)
    resumed = make_request(prompt=PROMPT, resumed=whole[: length - 1], max_tokens=100, repetition_detection=TWICE)
    run.submit(resumed)
    run.finish()
    assert (run.tokens(), run.finish_reason()) == (whole[length - 1 : length], FinishReason.REPETITION)


def test_a_constrained_output_ends_with_its_first_repetition() -> None:
    run = CoreRun()
    constrained = request(grammar=fake_grammar(1))
    run.submit(constrained)
    run.finish()
    whole, _ = generate_constrained(constrained, run.eos_token_ids, run.max_model_len)
    length = length_of_first_repetition(whole)
    assert (run.tokens(), run.finish_reason()) == (whole[:length], FinishReason.REPETITION)


@pytest.mark.parametrize(
    ("token_ids", "sizes", "count", "is_met"),
    [
        ([7, 7, 7], (0, 1), 3, True),
        ([7, 7], (0, 1), 3, False),
        ([7, 7, 7], (2, 3), 2, False),
        ([7, 7, 7, 7], (2, 3), 2, True),
        ([9, 1, 2, 1, 2, 1, 2], (1, 3), 3, True),
        ([1, 2, 1, 2, 1, 2, 9], (1, 3), 3, False),
        ([1, 2, 3, 1, 9, 3], (1, 3), 2, False),
        ([1, 2, 3, 1, 2, 3], (1, 2), 2, False),
        ([], (1, 3), 2, False),
    ],
)
def test_repetitions_are_those_at_the_end(
    token_ids: list[int], sizes: tuple[int, int], count: int, is_met: bool
) -> None:
    params = RepetitionDetectionParams(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
    assert params.is_met(token_ids, 0) is is_met
    assert params.is_met([*token_ids, *token_ids], len(token_ids)) is is_met, "what is before the start does not count"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_pattern_size": 3}, "min_count"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 513, "min_count": 2}, "at most 512"),
        ({"max_pattern_size": -1}, "min_pattern_size"),
    ],
)
def test_wrong_parameters_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RepetitionDetectionParams(**fields)
