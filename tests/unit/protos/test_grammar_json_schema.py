"""JSON schemas: what is accepted, what is refused, and that hostile ones are answered."""

import json
import time
from contextlib import suppress
from functools import reduce
from typing import Any

import pytest

from proa.contract import StructuredOutputsParams
from proa.grammar import GrammarError, check, lower
from support.grammars import accepts, lowered

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def warnings(schema: Any) -> tuple[str, ...]:
    return lower(StructuredOutputsParams(json=schema), {}).warnings


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
def test_a_schema_or_its_text_is_accepted(schema: Any) -> None:
    grammar = lowered(json=schema)

    assert accepts(grammar, '{"name": "Zoë", "age": 3}')
    assert not accepts(grammar, '{"name": "Zoë", "age": -3}')
    assert not accepts(grammar, '{"name": "Zoë"}')


def test_whitespace_is_fixed_unless_the_request_says_otherwise() -> None:
    spaced, none, free = '{"a": 1, "b": 2}', '{"a":1,"b":2}', '{"a" :\t1,"b":2 }'
    schema = {"const": {"a": 1, "b": 2}}

    def taken(**options: Any) -> list[bool]:
        grammar = lowered(json=schema, **options)
        return [accepts(grammar, text) for text in (spaced, none, free)]

    assert taken() == [True, False, False]
    assert taken(disable_any_whitespace=True) == [False, True, False]
    assert taken(whitespace_pattern=r"[ \t]?") == [True, True, True]


def test_json_object_is_any_object() -> None:
    grammar = lowered(json_object=True)

    assert accepts(grammar, '{"a": [1, {"b": null}]}')
    assert not accepts(grammar, "[]")


def test_the_schema_true_is_any_json() -> None:
    assert accepts(lowered(json=True), '[1, "a"]')


def test_options_of_a_client_are_removed_at_the_root_and_ignored_below() -> None:
    options = {"lenient": True, "whitespace_flexible": True}
    schema = {"x-guidance": options, "type": "array", "items": {"x-guidance": options, "type": "integer"}}

    assert not accepts(lowered(json=schema), "[ 1 ]")
    assert "lenient" not in lowered(json={"x-guidance": options, "type": "array"}).text
    properties = {"x-guidance": {"type": "integer"}, "format": {"type": "integer"}, "$ref": {"type": "integer"}}
    assert accepts(lowered(json={"properties": properties, "required": ["x-guidance"]}), '{"x-guidance": 1}')


def test_values_of_unknown_keywords_are_not_read_as_schemas() -> None:
    schema = {"type": "string", "maxLength": 1, "x-field": {"type": "dropdown", "pattern": 3, "required": True}}

    assert accepts(lowered(json=schema), '"a"')


def test_names_and_values_that_look_like_special_tokens_are_text() -> None:
    schema = {"properties": {"<eos>": {"const": "<|im_end|>"}, "</a>": {}}, "required": ["<eos>"], "type": "object"}

    grammar = lowered(json=schema)

    assert accepts(grammar, '{"<|im_end|>": 1}') is False
    assert '"<eos>": {"const": "<|im_end|>"}' in grammar.text


def test_references_to_itself_are_held() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}

    grammar = lowered(json={"$ref": "#/$defs/node", "$defs": {"node": node}})

    assert accepts(grammar, '{"next": {"next": {}}}')
    assert not accepts(grammar, '{"next": 1}')


def test_strict_refuses_what_is_otherwise_relaxed_with_a_warning() -> None:
    one_of = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    odd_format = {"type": "array", "items": {"type": "string", "format": "color"}}

    assert warnings(one_of) == ("$: oneOf is enforced as anyOf",)
    assert warnings(odd_format) == ("$[*]: format 'color' is not enforced",)
    assert warnings({**PERSON, "default": {"format": "color", "oneOf": []}}) == ()
    assert accepts(lowered(json=odd_format), '["red"]')
    with pytest.raises(GrammarError, match="oneOf is supported only if its schemas cannot overlap"):
        lowered(json=one_of, strict=True)
    with pytest.raises(GrammarError, match=r"\$\[\*\]: format 'color' is not supported"):
        lowered(json=odd_format, strict=True)


def test_disjoint_schemas_of_one_of_are_held_strictly() -> None:
    kinds = [{"properties": {"kind": {"const": kind}}, "required": ["kind"], "type": "object"} for kind in "ab"]

    assert accepts(lowered(json={"oneOf": kinds}, strict=True), '{"kind": "b"}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "no output can match the JSON schema false"),
        ("[]", "must be an object or a boolean"),
        ("{", "the JSON schema is not JSON"),
        ('{"minimum": NaN}', "is not JSON: NaN"),
        ({"minimum": float("inf")}, "is not JSON"),
        ({"const": {1, 2}}, "is not JSON"),
        ({"properties": {"a": {"not": {"minLength": 1}}}}, r"^\$\.a: not is not supported$"),
        ({"$ref": "http://example.com/schema"}, "http://example.com/schema"),
        ({"$ref": "#/$defs/a"}, "does not exist"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater than maximum \(3\)"),
        ({"type": "strnig"}, r"^\$: type 'strnig' is none of array, boolean, integer, null, number, object, string$"),
        ({"properties": {"a": {"type": ["null", 3]}}}, r"^\$\.a: type must be a string or an array of strings$"),
        ({"properties": {"a": "string"}}, r"^\$: properties must hold schemas, which are objects or booleans$"),
        ({"items": {"anyOf": [{}, 3]}}, r"^\$\[\*\]: anyOf must hold schemas"),
        ({"items": [{}, 3]}, r"^\$: items must hold schemas"),
        ({"additionalProperties": "no"}, r"^\$: additionalProperties must hold schemas"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"enum": "b"}}}, r"^\$: enum must be an array$"),
        ({"enum": []}, "Unsatisfiable"),
        ({"multipleOf": 0, "type": "integer"}, "invalid multiple of"),
        ({"minLength": "é" * 120}, "minLength must be a number"),
        ({"format": ["é" * 120]}, "format must be a string"),
        ({"required": "é" * 120}, "required must be an array of strings"),
        ({"patternProperties": "é" * 120}, "patternProperties must be an object"),
        ({"const": "a\ud800"}, "unexpected end of hex escape"),
        ({"const": "a" * 262_144}, "at most 262144 bytes"),
        ({"type": "string", "pattern": "(("}, "JSON schema: invalid regex: unclosed group$"),
        ({"pattern": "a" * 4097}, "a regular expression must be at most 4096 characters"),
        ({"patternProperties": {str(n) + "a" * 2000: {} for n in range(10)}}, "at most 16384 characters long together"),
        ({"patternProperties": {f"^a{n}$": {} for n in range(300)}}, "too many patternProperties"),
        (
            {"enum": [{"a": n} for n in range(2001)]},
            "at most 2000 objects and arrays, this one has 2001",
        ),
    ],
)
def test_what_cannot_be_held_is_named(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        lowered(json=schema, strict=True)


@pytest.mark.parametrize("values", [[0.01, 5, 2.5, 100], [1_000_000], [10_000], [0.001, 7], [4096, 512], [-3, 0.5]])
def test_usual_multiples_are_taken(values: list[float]) -> None:
    lowered(json={"properties": {str(value): {"type": "number", "multipleOf": value} for value in values}})


@pytest.mark.parametrize("values", [[999_983], [10_007], [99.991], [9973, 9967], [999_900], [99_990_000]])
def test_multiples_that_compile_for_seconds_are_refused(values: list[float]) -> None:
    schemas = [{"multipleOf": value} for value in values]
    for schema in ({"allOf": schemas}, {"$ref": "#/x", "x": {"allOf": schemas}}, {"$ref": "#/enum/0", "enum": schemas}):
        with pytest.raises(GrammarError, match="multipleOf is supported up to 10000"):
            lowered(json=schema)


def nested(depth: int, inner: dict[str, Any]) -> dict[str, Any]:
    return reduce(lambda schema, _: {"items": schema}, range(depth), inner)


def chain(length: int, depth: int, **more: Any) -> dict[str, Any]:
    """Definitions, each of which refers to the next."""
    definitions = {f"a{n}": nested(depth, {"$ref": f"#/$defs/a{n + 1}"}) for n in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{length}": {"type": "string"}}, **more}


def test_deep_schemas_are_refused_without_recursion() -> None:
    lowered(json=nested(99, {}))
    with pytest.raises(GrammarError, match="nested at most 100 levels deep"):
        lowered(json=nested(100, {}))
    with pytest.raises(GrammarError, match=r"nested at most 100 levels deep|is not JSON"):
        lowered(json='{"items":' * 20_000 + "{}" + "}" * 20_000)


def test_the_longest_chain_of_references_compiles() -> None:
    lowered(json=chain(45, 20))


@pytest.mark.parametrize(
    "schema", [chain(2000, 1), chain(100, 20), chain(999, 0, **{"$id": "#", "items": {"$id": "http://a.example/b"}})]
)
def test_longer_chains_which_overflow_the_stack_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match=r"levels, \$ref included; at most 1000 are supported"):
        lowered(json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {n}" for n in range(15_000)]},
        {"type": "object", "properties": {f"p{n}": {} for n in range(2000)}},
        {"type": "string", "minLength": 100_000},
        {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
        {"type": "string", "pattern": ".*a.{1000}"},
        {"type": "array", "minItems": 10**18},
        {"allOf": [{"anyOf": [{"properties": {f"p{n}{m}": {}}} for m in range(10)]} for n in range(6)]},
        {"const": "a" * 250_000},
    ],
)
def test_hostile_schemas_are_answered_soon(schema: dict[str, Any]) -> None:
    """A loose bound against hanging, not a measurement."""
    start = time.monotonic()
    with suppress(GrammarError):
        check(lower(StructuredOutputsParams(json=schema), {}).grammar.text)
    assert time.monotonic() - start < 20
