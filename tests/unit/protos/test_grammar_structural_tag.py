"""Structural tags, old and new form."""

from typing import Any

import pytest

from proa.grammar import GrammarError
from support.grammars import accepts, added_tokens, lowered

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
TAGS = [
    {"begin": "<f=a>", "content": INTEGER, "end": "</f>"},
    {"begin": "<f=b>", "content": {"type": "regex", "pattern": "[a-z]+"}, "end": ["</f>", "</g>"]},
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "separator": ", ", "tags": TAGS}


def tag(content: Any, end: Any = "</t>") -> dict[str, Any]:
    return {"type": "tag", "begin": "<t>", "content": content, "end": end}


def text(value: str) -> dict[str, str]:
    return {"type": "const_string", "value": value}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def any_of(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (TRIGGERED, ["", "hi\n", "x <f=a>1</f> y", "<f=b>q</g><f=a>2</f>"], ["<f=c>", "x <f=a>q</f>", "<f=b>q</f"]),
    ({**TRIGGERED, "at_least_one": True}, ["<f=a>1</f>", "<f=a>1</f> y <f=b>q</f>."], ["", "x <f=a>1</f>"]),
    ({**TRIGGERED, "stop_after_first": True}, ["x", "x <f=a>1</f>"], ["x <f=a>1</f> y"]),
    ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"], ["", "<f=a>1</f>x"]),
    (SEPARATED, ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>q</f>"], ["x", "<f=a>1</f>, ", "<f=a>1</f><f=a>1</f>"]),
    ({**SEPARATED, "at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"], ["", "<f=a>1</f>, <f=a>1</f>"]),
    (tag({"type": "any_text"}), ["<t></t>", "<t>a\n<f=</t>"], ["<t>a", "<t>a</t>b", "a"]),
    (tag({"type": "any_text"}, ["</t>", "<think>"]), ["<t>a</t>", "<t>a<think>"], ["<t>a<think>b"]),
    (tag({"type": "any_text"}, "\n<think>!"), ["<t>a\n<think>!"], ["<t>a!"]),
    (tag(INTEGER, ["<think>"]), ["<t>12<think>"], ["<t>12"]),
    (
        {"type": "sequence", "elements": [tag({"type": "any_text"}), text("!"), {"type": "any_text"}]},
        ["<t>a</t>!b"],
        ["!"],
    ),
    (
        {"type": "or", "elements": [text('{"z'), INTEGER, {"type": "grammar", "grammar": "start: /q+/"}]},
        ['{"z', "3", "qq"],
        ["{"],
    ),
    (
        {"type": "or", "elements": [{"type": "json_schema", "json_schema": {"const": {"a": n}}} for n in (1, 2)]},
        ['{"a": 2}'],
        ["1"],
    ),
    ({"type": "star", "content": text("ab")}, ["", "abab"], ["aba"]),
    ({"type": "plus", "content": text("ab")}, ["ab"], [""]),
    ({"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= "b" x\nx ::= [0-9]'}}, ["", "b1"], ["b"]),
]


@pytest.mark.parametrize(("form", "accepted", "rejected"), CASES)
def test_new_form(form: dict[str, Any], accepted: list[str], rejected: list[str]) -> None:
    grammar = lowered(structural_tag={"type": "structural_tag", "format": form})

    assert [each for each in accepted if not accepts(grammar, each)] == []
    assert [each for each in rejected if accepts(grammar, each)] == []


def test_old_form_is_triggered_tags() -> None:
    structures = [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}]
    grammar = lowered(structural_tag={"structures": structures, "triggers": ["<f"]})

    assert accepts(grammar, "see <f=a>1</f> there")
    assert not accepts(grammar, "see <f=a>x</f>")


def test_a_trigger_that_is_one_token_leaves_the_engine_free_until_it() -> None:
    tags = [
        {"begin": "<think>a", "content": INTEGER, "end": "<think>"},
        {"begin": "<think>", "content": text("q"), "end": "."},
    ]
    form = {"type": "triggered_tags", "triggers": ["<think>"], "tags": tags}

    grammar = lowered(structural_tag={"format": form})

    assert (grammar.start_after, grammar.repeats) == ((added_tokens()["<think>"],), True)
    assert accepts(grammar, "a12<think>")
    assert accepts(grammar, "q.")
    assert not accepts(grammar, "<think>q.")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "token", "token": 3}, "type 'token' is not supported"),
        ({"type": "dispatch", "rules": []}, "type 'dispatch' is not supported"),
        ({"type": "repeat", "min": 1, "max": 2, "content": text("a")}, "type 'repeat' is not supported"),
        ({**INTEGER, "style": "qwen_xml"}, "style 'qwen_xml' of json_schema is not supported"),
        ({**INTEGER, "any_order": True}, "any_order of json_schema is not supported"),
        ({"type": "any_text", "excludes": ["a"]}, "excludes of any_text is not supported"),
        ({"type": "sequence", "elements": [{"type": "any_text"}, text("a")]}, "any_text must be last"),
        (tag(TRIGGERED), "triggered_tags must be last"),
        ({"type": "sequence", "elements": []}, "elements must be an array of objects"),
        ({**TRIGGERED, "triggers": ["<g"]}, "must begin with exactly one of the triggers"),
        ({**TRIGGERED, "triggers": ["<f", "<f="]}, "must begin with exactly one of the triggers"),
        ({**TRIGGERED, "triggers": [""]}, "strings that are not empty"),
        (
            {"type": "triggered_tags", "triggers": ["<th"], "tags": [tag(INTEGER) | {"begin": "<think>"}]},
            "ends inside of a token",
        ),
        ({"type": 3}, "type must be a string"),
        (tag({"type": "any_text"}, [""]), "not empty"),
        (tag(INTEGER) | {"begin": {"type": "token", "token": 3}}, "begin must be a string"),
    ],
)
def test_other_formats_are_refused_by_name(form: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        lowered(structural_tag={"format": form})


@pytest.mark.parametrize("structural_tag", ["{", "3", "{}", '{"format": 3}', '{"structures": [{}], "triggers": ["a"]}'])
def test_a_malformed_tag_is_refused(structural_tag: str) -> None:
    with pytest.raises(GrammarError, match="structural_tag"):
        lowered(structural_tag=structural_tag)


def test_deep_nesting_is_refused() -> None:
    form: dict[str, Any] = text("a")
    for _ in range(200):
        form = {"type": "star", "content": form}

    with pytest.raises(GrammarError, match="nested at most 20 levels deep"):
        lowered(structural_tag={"format": form})


def test_bounds_hold_for_all_tags_together() -> None:
    primes = [schema({"type": "integer", "multipleOf": prime}) for prime in (101, 103)]
    lowered(structural_tag={"format": any_of(primes[0])})
    with pytest.raises(GrammarError, match="multipleOf is supported up to 10000"):
        lowered(structural_tag={"format": any_of(*primes)})
    with pytest.raises(GrammarError, match="at most 16384 characters long together"):
        lowered(structural_tag={"format": any_of(*({"type": "regex", "pattern": "a" * 4000} for _ in range(5)))})
