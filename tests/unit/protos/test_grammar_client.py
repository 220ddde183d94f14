"""Grammars of clients in Lark and EBNF."""

import time

import pytest

from proa.grammar import GrammarError
from support.grammars import accepts, added_tokens, lowered

EBNF = r"""
# a list
root ::= "[" item ("," item)* "]"
  | "none"  # nothing
item ::= [a-c\-]+ | "\u00e9\"" | number-2
number-2 ::= [0-9]{1,2}
"""


@pytest.mark.parametrize("text", ["[a-b,7]", "none", '[é"]', "[12]"])
def test_ebnf_accepts(text: str) -> None:
    assert accepts(lowered(grammar=EBNF), text)


@pytest.mark.parametrize("text", ["[]", "[123]", "[d]", "", "[é]"])
def test_ebnf_rejects(text: str) -> None:
    assert not accepts(lowered(grammar=EBNF), text)


@pytest.mark.parametrize(
    ("grammar", "accepted", "rejected"),
    [
        ('start: "a"~2..3', "aaa", "a"),
        ("?start: INT\n%import common.INT", "12", "a"),
        ('  start : A+\nA: "a".."c"\n%ignore " "', "a b", "d"),
        ('%llguidance {}\nstart[capture]: "a" | b\nb: "<" %json {"type": "integer"} ">"', "<3>", "<a>"),
        ('start: "%json {}" /%json "x"/ // %json {', '%json {}%json "x"', "{}"),
        ('start: "a" <think> "b"', "a<think>b", "ab"),
        ('start: %json\n  {"const": {"a": [1, 2]}} "x"', '{"a": [1, 2]}x', '{"a":[1,2]}x'),
    ],
)
def test_lark_passes(grammar: str, accepted: str, rejected: str) -> None:
    assert accepts(lowered(grammar=grammar), accepted)
    assert not accepts(lowered(grammar=grammar), rejected)


def test_options_of_json_inside_are_ours() -> None:
    schema = '{"x-guidance": {"lenient": true, "whitespace_flexible": true}, "type": "array"}'

    assert "lenient" not in lowered(grammar=f"start: %json {schema}").text


def test_an_added_token_is_named_by_its_text() -> None:
    think = added_tokens()["<think>"]
    tag = {"format": {"type": "grammar", "grammar": "start: <think>"}}

    assert lowered(grammar='start: <think> "<think>" /[<>]/ <[0]>').text == f'start: <[{think}]> "<think>" /[<>]/ <[0]>'
    assert f"start: <[{think}]>" in lowered(structural_tag=tag).text
    with pytest.raises(GrammarError, match=r"the tokenizer has no added token <\|nothing\|>"):
        lowered(grammar="start: <|nothing|>")


def test_bounds_hold_for_json_inside() -> None:
    with pytest.raises(GrammarError, match="multipleOf is supported up to 10000"):
        lowered(grammar='start: "a" %json {"type": "integer", "multipleOf": 999983}')


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "must be written in Lark"),
        ("hello", "must be written in Lark"),
        ('{"grammars": [{"json_schema": {"title": "%llguidance"}}]}', "not in JSON"),
        ("root ::= other", "EBNF grammar: Rule 'other' not found"),
        ('other ::= "a"', "No 'root' rule found"),
        ("root ::= " + "(" * 2000 + '"a"' + ")" * 2000, "nested too deeply"),
        ("start: %json {", "%json must be followed by JSON"),
        ("start: %json " + "[" * 60_000, "%json must be followed by JSON"),
        ("start: a", 'unknown name: "a"'),
        ('start: A\nA.2: "x"', "priority not supported"),
        ("start: /" + "(?:a|b)*" * 600 + "/", "at most 4096 characters"),
        ('start: "' + "a" * 65_536 + '"', "at most 65536 characters"),
        ("start: A0\n" + "\n".join(f"A{n}: A{n + 1}" for n in range(2500)), "at most 2000 rules and parentheses"),
        ("start: " + '("x" ' * 2500 + ")" * 2500, "at most 2000 rules and parentheses"),
        ("root ::= a0\n" + "\n".join(f"a{n} ::= a{n + 1}" for n in range(2000)), "at most 300 rules"),
        ("start: " + "%lark {\nstart: " * 40 + '"a"' + "\n}" * 40, "too deeply nested"),
    ],
)
def test_a_grammar_that_cannot_be_held_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        lowered(grammar=grammar)


def test_the_longest_chain_of_rules_compiles() -> None:
    chain = "\n".join(f"a{n}: a{n + 1}" for n in range(1990))

    assert accepts(lowered(grammar=f'start: a0\n{chain}\na1990: "x"'), "x")


@pytest.mark.parametrize(
    "grammar",
    [
        "\n" * 65_000,
        "start" + " " * 65_000,
        "start: " + '"' + '\\"' * 32_000,
        "start: /" + "\\/" * 2000 + "\\",
        "root ::= " + " " * 65_000 + "x",
        "root ::= [" + "\\[" * 32_000,
        "root ::= " + '"' * 65_001,
        "root ::= " + "a" * 65_000,
        "root ::= " + "a | " * 16_000 + "b",
    ],
)
def test_hostile_grammars_are_refused_soon(grammar: str) -> None:
    """A loose bound against quadratic time, not a measurement."""
    start = time.monotonic()
    with pytest.raises(GrammarError):
        lowered(grammar=grammar)
    assert time.monotonic() - start < 20
