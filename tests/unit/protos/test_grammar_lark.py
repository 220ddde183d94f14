"""Literals, choices, regular expressions and clients' grammars."""

import pytest

from proa.contract import Grammar
from proa.grammar import GrammarError, check
from proa.grammar.lark import literal, split
from support.grammars import accepts, added_tokens, lowered

ODD_TEXTS = [
    "",
    "a",
    '"',
    "\\",
    "\n\r\t",
    "\x00\x1f\x7f",
    "é😀\u2028",
    "// #",
    "<b>",
    "<[3]>",
    "%json {}",
    "</a",
    "$name",
]


@pytest.mark.parametrize("text", [*ODD_TEXTS, "x<think>y", "added Ω token", "<think><think>", "<eo", "a" * 1000])
def test_a_literal_matches_its_text_and_no_other(text: str) -> None:
    grammar = Grammar(text=f"start: {literal(text, added_tokens())}")

    assert accepts(grammar, text)
    assert not accepts(grammar, f"{text}x")


def test_added_tokens_are_written_as_ids() -> None:
    assert literal("a<think>\nb", {"<think>": 7, "b": 9}) == r'"a" <[7]> "\n" <[9]>'
    assert literal("", {}) == '""'


def test_the_longest_added_token_is_taken() -> None:
    assert split("<ab>", {"<a": 1, "<ab>": 2, "": 3}) == [("<ab>", 2)]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"lone surrogate \\ud800"):
        literal("a\ud800", {})


def test_one_of_the_choices_is_accepted() -> None:
    grammar = lowered(choice=["a", "ab", "a", "", *ODD_TEXTS])

    for text in ("a", "ab", *ODD_TEXTS):
        assert accepts(grammar, text)
    assert not accepts(grammar, "b")
    assert not accepts(grammar, "aab")


def test_an_empty_choice_accepts_the_empty_output_only() -> None:
    assert accepts(lowered(choice=[""]), "")
    assert not accepts(lowered(choice=[""]), "a")


def test_many_choices_are_one_terminal() -> None:
    grammar = lowered(choice=[f"word {number}" for number in range(15_000)])

    assert accepts(grammar, "word 14999")
    assert not accepts(grammar, "word 15000")


def test_no_choices_are_refused() -> None:
    with pytest.raises(GrammarError, match="choice must hold at least one string"):
        lowered(choice=[])


@pytest.mark.parametrize(
    ("pattern", "accepted", "rejected"),
    [
        (r"\d+", "12", "x12"),
        (r"^a|b$", "b", "ab"),
        ("a/b\n", "a/b\n", "a/b"),
        (r"[/]//\/", "////", "/"),
        ("", "", "a"),
        ("//", "//", ""),
        ("#x", "#x", ""),
        (r"(?i)é+", "Éé", "e"),
        (r"\\", "\\", ""),
    ],
)
def test_a_regex_matches_the_whole_output(pattern: str, accepted: str, rejected: str) -> None:
    grammar = lowered(regex=pattern)

    assert accepts(grammar, accepted)
    assert not accepts(grammar, rejected)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        (r"\bfoo", "lookarounds not supported"),
        ("[a", "unclosed character class"),
        ("a\\", "must not end with a backslash"),
        ("a" * 4097, "at most 4096 characters long, this one has 4097"),
    ],
)
def test_a_regex_that_cannot_be_held_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        lowered(regex=pattern)


def test_a_regex_cannot_add_rules() -> None:
    assert accepts(lowered(regex='x/\nstart: "y"'), 'x/\nstart: "y"')


def test_errors_are_one_line_for_the_client() -> None:
    with pytest.raises(GrammarError) as raised:
        check('start: "a" b\n')

    assert str(raised.value) == 'unknown name: "b"'
