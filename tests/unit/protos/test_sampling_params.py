"""SamplingParams: accepted ranges, and the errors outside them."""

import math
from dataclasses import replace
from typing import Any

import pytest

from proa.contract import SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 5.0},
        {"top_p": 1},
        {"top_p": 0.001},
        {"top_k": 1},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"presence_penalty": -2.0, "frequency_penalty": 2},
        {"repetition_penalty": 0.1},
        {"max_tokens": 1},
        {"max_tokens": None, "min_tokens": 10},
        {"max_tokens": 4, "min_tokens": 4},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"n": 128},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1, "key": 2**64 - 1},
        {"key": 0},
        {"logit_bias": {0: -100, 1: 100.0}},
    ],
)
def test_accepts_the_edges_of_every_range(params: dict[str, Any]) -> None:
    made = SamplingParams(**params)
    for name, value in params.items():
        assert getattr(made, name) == value


def test_a_seed_of_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1).seed is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature must be finite, got nan"),
        ({"temperature": math.inf}, "temperature must be finite, got inf"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"top_p": 0}, "top_p must be greater than 0, got 0"),
        ({"top_p": 1.01}, "top_p must be at most 1, got 1.01"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"min_p": -0.5}, "min_p must be at least 0, got -0.5"),
        ({"min_p": 1.5}, "min_p must be at most 1, got 1.5"),
        ({"presence_penalty": 2.1}, "presence_penalty must be at most 2, got 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be at least -2, got -2.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than 0, got 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be finite, got nan"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"max_tokens": 3, "min_tokens": 4}, r"min_tokens must be at most max_tokens \(3\), got 4"),
        ({"logprobs": -1}, "logprobs must be at least 0, got -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be at least 0, got -1"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"n": True}, "n must be an integer, got True"),
        ({"seed": 2**64}, "seed must be at most 18446744073709551615"),
        ({"key": -1}, "key must be at least 0, got -1"),
        ({"key": 2**64}, "key must be at most 18446744073709551615"),
        ({"stop": ["", "x"]}, "stop must hold non-empty strings, got ''"),
        ({"stop": [1]}, "stop must hold non-empty strings, got 1"),
        ({"bad_words": [""]}, "bad_words must hold non-empty strings"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"logit_bias": [5]}, r"logit_bias must be a dict, got \[5\]"),
        ({"stop_token_ids": [-1]}, "a token id in stop_token_ids must be at least 0, got -1"),
        ({"allowed_token_ids": ["1"]}, "a token id in allowed_token_ids must be an integer, got '1'"),
        ({"bad_words_token_ids": [[1], []]}, "bad_words_token_ids must hold non-empty sequences"),
        ({"logit_bias": {1: 101}}, "logit_bias of token 1 must be at most 100, got 101"),
        ({"logit_bias": {1: math.nan}}, "logit_bias of token 1 must be finite"),
        ({"logit_bias": {"1": 1.0}}, "a token id in logit_bias must be an integer, got '1'"),
    ],
)
def test_rejects_values_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_keeps_lists_as_tuples() -> None:
    params: Any = {"stop": ["a", "b"], "stop_token_ids": [1, 2], "bad_words_token_ids": [[1], [2, 3]]}
    made = SamplingParams(**params)
    assert made.stop == ("a", "b")
    assert made.stop_token_ids == (1, 2)
    assert made.bad_words_token_ids == ((1,), (2, 3))


def test_one_stop_string_needs_no_list() -> None:
    stop: Any = "end"
    assert SamplingParams(stop=stop).stop == ("end",)


def test_top_k_of_minus_one_means_all() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_whole_numbers_become_floats() -> None:
    params = SamplingParams(temperature=1, logit_bias={3: 5})
    assert type(params.temperature) is float
    assert type(params.logit_bias[3]) is float


def test_later_changes_of_an_argument_change_nothing() -> None:
    biases = {1: 1.0}
    params = SamplingParams(logit_bias=biases)
    biases[2] = 2.0
    assert params.logit_bias == {1: 1.0}


def test_changed_fields_are_checked_by_replace() -> None:
    params = SamplingParams(max_tokens=8)
    params.max_tokens = 64
    params.stop = "end"  # type: ignore[assignment]
    used = replace(params)
    assert (used.max_tokens, used.stop) == (64, ("end",))
    params.temperature = -1.0
    with pytest.raises(ValueError, match="temperature must be at least 0"):
        replace(params)
    assert used.temperature == 1.0
