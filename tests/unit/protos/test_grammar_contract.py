"""Grammar and StructuredOutputsParams: what they accept, and the errors for the rest."""

from typing import Any

import pytest

from proa.contract import FinishReason, Grammar, StructuredOutputsParams
from proa.contract.pb import from_pb
from proa.engine.v1 import core_pb2


def test_lists_of_token_ids_are_kept_as_tuples() -> None:
    grammar = Grammar(text="start:", start_after=[3, 4], free_if_first=[5])  # type: ignore[arg-type]

    assert (grammar.start_after, grammar.free_if_first) == ((3, 4), (5,))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ""}, "the text of a grammar must not be empty"),
        ({"text": "a" * 262_145}, "a grammar must be at most 262144 bytes long, this one has 262145"),
        ({"text": "é" * 131_073}, "a grammar must be at most 262144 bytes long, this one has 262146"),
        ({"text": "a\ud800"}, r"a grammar must not contain the lone surrogate \\ud800"),
        ({"text": "start:", "repeats": True}, "free_if_first and repeats of a grammar need start_after"),
        ({"text": "start:", "free_if_first": (1,)}, "free_if_first and repeats of a grammar need start_after"),
    ],
)
def test_a_grammar_that_no_engine_accepts_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grammar(**fields)


def test_the_longest_grammar_is_accepted() -> None:
    assert len(Grammar(text="é" * 131_072).text) == 131_072


def test_a_message_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="the text of a grammar must not be empty"):
        from_pb(Grammar, core_pb2.Grammar())


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {}},
        {"json": False},
        {"json": "{}", "whitespace_pattern": " ?"},
        {"regex": ""},
        {"choice": []},
        {"grammar": "start:"},
        {"json_object": True, "disable_any_whitespace": True},
        {"json_object": False, "regex": "a"},
        {"structural_tag": "{}"},
    ],
)
def test_one_form_is_accepted_even_if_it_is_empty(fields: dict[str, Any]) -> None:
    StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag; got none"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json": False, "grammar": "a", "json_object": True}, "got json and grammar and json_object"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern and disable_any_whitespace exclude each other",
        ),
    ],
)
def test_no_form_and_several_forms_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**fields)


def test_clients_and_metrics_know_a_complete_output_as_stopped() -> None:
    names = [reason.public_name for reason in FinishReason]
    assert names == ["stop", "length", "abort", "error", "stop", "repetition"]
