"""Hostile grammars are refused, or compiled on the stack of a compiler's thread. A crash would end the test run."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from proa.contract.grammar import MAX_GRAMMAR_BYTES
from proa.grammar import GrammarError, check_complexity
from proa_engine.grammar import LLGuidanceGrammars
from support.llguidance_engine import cursor, llguidance_grammars, make_request, prepare


def schema(value: object) -> str:
    return f"start: %json {json.dumps(value)}"


def references(count: int, depth: int = 1) -> str:
    """A chain of references, each target at `depth` levels."""
    definitions: dict[str, Any] = {str(count): {"type": "null"}}
    for index in range(count):
        target: dict[str, Any] = {"$ref": f"#/$defs/{index + 1}"}
        for _ in range(depth - 1):
            target = {"type": "array", "items": target}
        definitions[str(index)] = target
    return schema({"$ref": "#/$defs/0", "$defs": definitions})


def rules(count: int, name: str = "a") -> str:
    """A chain of rules, or of terminals."""
    chain = "".join(f"{name}{index}: {name}{index + 1}\n" for index in range(count))
    return f'start: {name}0\n{chain}{name}{count}: "x"\n'


def optional(count: int) -> str:
    return schema({"type": "object", "properties": {f"k{index}": {} for index in range(count)}})


REFUSED = {
    "references": references(8000),
    "references to nested schemas": references(80, depth=60),
    "depth": schema(json.loads('{"items":' * 120 + "{}" + "}" * 120)),
    "JSON deeper than Python reads": "start: %json " + '{"items":' * 25_000 + "{}" + "}" * 25_000,
    "chain of rules": rules(12_000),
    "chain of terminals": rules(12_000, "A"),
    "parentheses": 'start: ("' + "(" * 100_000,
    "open parentheses": "start: " + "(" * 100_000,
    "nested Lark": "start: " + "%lark { start: " * 5000 + '"x"' + " }" * 5000,
    "repetitions": "start: A\nA: " + '"x"? ' * 50_000,
    "ranges": "start: A\nA: " + '"x"{0,9999} ' * 18_000,
    "many optional properties": optional(10_000),
    "multipleOf": schema({"type": "integer", "multipleOf": 999_983}),
    "long regular expression": f"start: /{'a*b*.*' * 5000}/",
    "long pattern": schema({"type": "string", "pattern": "a*b*.*" * 5000}),
    "long whitespace": schema({"x-guidance": {"whitespace_pattern": "a*b*.*" * 5000}}),
    "grammar in JSON": json.dumps({"grammars": [{"lark_grammar": rules(12_000)}]}),
    "optional properties that no state holds": optional(600),
    "panic": 'start: %json {"minLength": "' + "é" * 300 + '"}',
    "more symbols than llguidance can number": "start: " + '"x" ' * 65_500,
    "nothing matches": "start: A\nA: /a/ & /b/",
    "endless recursion": "start: start",
}
COMPILED = {
    "references": references(900),
    "chain of rules": rules(3900),
    "chain of terminals": rules(3900, "A"),
    "large enum": schema({"enum": [f"value {index}" for index in range(10_000)]}),
    "long text": schema({"type": "string", "minLength": 100_000}),
    "recursive schema": schema({"type": "array", "items": {"$ref": "#"}}),
    "left recursion": 'start: start "a" | "b"',
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[LLGuidanceGrammars]:
    with llguidance_grammars() as made:
        yield made


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_grammar_is_refused_for_good(grammars: LLGuidanceGrammars, name: str) -> None:
    assert len(REFUSED[name]) <= MAX_GRAMMAR_BYTES * 1.1
    ready = prepare(grammars, make_request(REFUSED[name][:MAX_GRAMMAR_BYTES]))

    assert ready.cursor is None
    assert ready.error
    assert "\n" not in ready.error
    assert not ready.retryable


@pytest.mark.parametrize("name", COMPILED)
def test_large_grammar_compiles(grammars: LLGuidanceGrammars, name: str) -> None:
    assert grammars.fill([(0, cursor(grammars, COMPILED[name]))]) is not None


def test_strings_comments_and_alternatives_do_not_count() -> None:
    check_complexity('start: "' + "(" * 9000 + '" /[a-z]{3}/ // ' + "(" * 9000)
    check_complexity("start: A\nA: " + '"x"|' * 20_000 + '"y"')


@pytest.mark.parametrize("part", ["(", "?", "a: b\n", "{", "["])
def test_every_kind_of_part_counts(part: str) -> None:
    check_complexity("x" + part * 8000)
    with pytest.raises(GrammarError, match="at most 8000 rules, parentheses and repetitions"):
        check_complexity("x" + part * 8001)
