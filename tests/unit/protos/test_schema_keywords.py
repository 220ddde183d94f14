"""Keywords of JSON schemas by value: what has no effect, what is rewritten, what is not enforced and where."""

import json
from contextlib import suppress
from typing import Any

import pytest

from proa.contract import StructuredOutputsParams
from proa.grammar import GrammarError, check, lower
from support.grammars import accepts

ARRAY = {"type": "array"}
OBJECT = {"type": "object"}
RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
TEXT = {"type": "string"}
NUMBERS = {"type": "array", "items": {"type": "integer"}}
BIG = 10**20

# Schema, texts that match, texts that do not. Strict and not strict, without a warning.
ENFORCED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    # without an effect
    "uniqueItems false": ({**NUMBERS, "uniqueItems": False}, ["[1, 1]"], ['["a"]']),
    "uniqueItems of one": ({**NUMBERS, "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1, 1]"]),
    "minContains without contains": ({**NUMBERS, "minContains": 2}, ["[]"], ["1"]),
    "maxContains without contains": ({**NUMBERS, "maxContains": 2}, ["[1, 2, 3]"], ["1"]),
    "contains of none": ({**NUMBERS, "contains": {"const": 7}, "minContains": 0}, ["[]", "[7]"], ["7"]),
    "dependentRequired empty": ({**RECORD, "dependentRequired": {}}, ['{"a": 1}'], ['{"a": "b"}']),
    "dependentRequired of nothing": ({**RECORD, "dependentRequired": {"a": []}}, ['{"a": 1}'], ['{"a": "b"}']),
    "dependentRequired of the required": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"], "dependentRequired": {"a": ["b"]}},
        ['{"b": 1}', '{"a": 1, "b": 1}'],
        ['{"a": 1}'],
    ),
    "dependentSchemas empty": ({**RECORD, "dependentSchemas": {}}, ['{"a": 1}'], ["1"]),
    "dependentSchemas of any": ({**RECORD, "dependentSchemas": {"a": True, "b": {}}}, ['{"a": 1}'], ["1"]),
    "dependencies empty": ({**RECORD, "dependencies": {}}, ['{"a": 1}'], ["1"]),
    "propertyNames true": ({**RECORD, "propertyNames": True}, ['{"a": 1}'], ['{"a": "b"}']),
    "propertyNames empty": ({**RECORD, "propertyNames": {}}, ['{"a": 1}'], ['{"a": "b"}']),
    "propertyNames are strings": ({**RECORD, "propertyNames": {"type": "string"}}, ['{"a": 1}'], ['{"a": "b"}']),
    "propertyNames described": (
        {**RECORD, "propertyNames": {"type": "string", "description": "a name"}},
        ['{"a": 1}'],
        ['{"a": "b"}'],
    ),
    "not false": ({**TEXT, "not": False}, ['"a"'], ["1"]),
    "if alone": ({**TEXT, "if": {"const": "a"}}, ['"a"'], ["1"]),
    "if with then of any": ({**TEXT, "if": {"const": "a"}, "then": {}, "else": True}, ['"a"'], ["1"]),
    "then alone": ({**TEXT, "then": {"const": "a"}}, ['"b"'], ["1"]),
    "unevaluatedProperties true": ({**RECORD, "unevaluatedProperties": True}, ['{"a": 1}'], ["1"]),
    "unevaluatedProperties of none left": ({**RECORD, "unevaluatedProperties": False}, ['{"a": 1}'], ["1"]),
    "unevaluatedItems empty": ({**NUMBERS, "unevaluatedItems": {}}, ["[1]"], ["1"]),
    "unevaluatedItems of none left": ({**NUMBERS, "unevaluatedItems": False}, ["[1]"], ["1"]),
    "minLength 0": ({**TEXT, "minLength": 0}, ['""'], ["1"]),
    "minItems 0": ({**ARRAY, "minItems": 0}, ["[]"], ["1"]),
    "minProperties 0": ({**OBJECT, "minProperties": 0}, ["{}"], ["1"]),
    "maxItems as a float": ({**NUMBERS, "maxItems": 1.0}, ["[1]"], ["[1, 2]"]),
    "maximum of all floats": ({"type": "number", "maximum": 1.7976931348623157e308}, ["1e9"], ['"a"']),
    "format of the eye": ({**TEXT, "format": "password"}, ['"a"'], ["1"]),
    "format of a number": ({"type": "integer", "format": "int32"}, ["1"], ['"a"']),
    "format of a library": ({**TEXT, "format": "cuid", "pattern": "^c[a-z]+$"}, ['"cab"'], ['"abc"']),
    "anchor of no reference": ({**TEXT, "$dynamicAnchor": "node"}, ['"a"'], ["1"]),
    "contains in draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", **NUMBERS, "contains": {"const": 7}},
        ["[1]"],
        ["1"],
    ),
    # rewritten
    "propertyNames of an enum": (
        {**RECORD, "propertyNames": {"enum": ["a", "b"]}},
        ["{}", '{"b": 1}', '{"a": 1, "b": 2}'],
        ['{"c": 1}', '{"a": "b"}'],
    ),
    "propertyNames of an enum and properties": (
        {
            "type": "object",
            "properties": {"b": {"const": "x"}, "c": {"const": "y"}},
            "additionalProperties": {"const": 1},
            "propertyNames": {"enum": ["a", "b"]},
        },
        ['{"b": "x", "a": 1}'],
        ['{"b": 1}', '{"c": "y"}'],
    ),
    "propertyNames of an enum, others false": (
        {**OBJECT, "properties": {"a": {}}, "additionalProperties": False, "propertyNames": {"enum": ["a", "b"]}},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "propertyNames of a constant": ({**RECORD, "propertyNames": {"const": "a"}}, ['{"a": 1}'], ['{"b": 1}']),
    "propertyNames of a reference": (
        {**RECORD, "propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"enum": ["a"], "title": "K"}}},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "propertyNames of alternatives": (
        {**RECORD, "propertyNames": {"anyOf": [{"const": "a"}, {"enum": ["b"]}]}},
        ['{"a": 1, "b": 1}'],
        ['{"c": 1}'],
    ),
    "propertyNames of a pattern": (
        {**RECORD, "propertyNames": {"type": "string", "pattern": "^k_"}},
        ['{"k_1": 1, "k_2": 2}'],
        ['{"a": 1}', '{"k_1": "b"}'],
    ),
    "propertyNames of a length": (
        {**RECORD, "propertyNames": {"minLength": 1, "maxLength": 2}},
        ['{"ab": 1}'],
        ['{"": 1}', '{"abc": 1}'],
    ),
    "propertyNames of a format": (
        {**RECORD, "propertyNames": {"format": "date"}},
        ['{"2026-01-31": 1}'],
        ['{"2026-1-31": 1}'],
    ),
    "propertyNames false": ({**RECORD, "propertyNames": False}, ["{}"], ['{"a": 1}']),
    "a property that is not": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": {}}, "additionalProperties": True},
        ['{"b": 1}', '{"c": 1}'],
        ['{"a": 1}'],
    ),
    "unevaluatedProperties false": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "unevaluatedItems false": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        ["[1]"],
        ["[1, 2]"],
    ),
    "not a type": ({"not": {"type": "string"}}, ["1", "[1]", "null"], ['"a"']),
    "not one of two types": ({"type": ["string", "null"], "not": {"type": "null"}}, ['"a"'], ["null"]),
    "not a number": ({"not": {"type": ["number", "object", "array"]}}, ['"a"', "true"], ["1", "1.5"]),
    "not all of an enum": ({"enum": ["a", 1, True], "not": {"enum": [1.0, "b"]}}, ['"a"', "true"], ["1"]),
    "not a constant": ({"enum": ["a", "b"], "not": {"const": "a"}}, ['"b"'], ['"a"']),
    # ends
    "integer": ({"type": "integer"}, ["9000000000000000000", "-12"], ["9000000000000000001", "1.5"]),
    "integer or null": ({"type": ["integer", "null"]}, ["7", "null"], [str(BIG), '"a"']),
    "integer of 64 bits": (
        {"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63},
        ["9000000000000000000"],
        [str(BIG), str(-BIG)],
    ),
    "integer from 0": ({"type": "integer", "minimum": 0}, ["0", "12"], ["-1", str(BIG)]),
    "number": ({"type": "number"}, ["12", "1.5", str(BIG)], ['"a"']),
    "date-time": (
        {**TEXT, "format": "date-time"},
        ['"2026-01-31T12:00:00.123456789+01:00"', '"2026-01-31T12:00:00Z"'],
        ['"2026-01-31T12:00:00.1234567890+01:00"', '"2026"'],
    ),
    "time": ({**TEXT, "format": "time"}, ['"12:00:00.123456789+01:00"'], ['"12:00:00.1234567890+01:00"']),
}

# Schema, the path and text of the warning, texts that match without the keyword and texts that still do not.
NOT_ENFORCED: dict[str, tuple[dict[str, Any], str, list[str], list[str]]] = {
    "uniqueItems": ({**NUMBERS, "uniqueItems": True}, "$: uniqueItems", ["[1, 1]"], ['["a"]']),
    "contains": ({**NUMBERS, "contains": {"const": 7}, "maxContains": 2}, "$: contains", ["[1]"], ['["a"]']),
    "if": ({**TEXT, "if": {"const": "a"}, "then": False}, "$: if", ['"a"'], ["1"]),
    "not": ({**RECORD, "not": {"required": ["a"]}}, "$: not", ['{"a": 1}'], ['{"a": "b"}']),
    "not an integer of numbers": ({"type": "number", "not": {"type": "integer"}}, "$: not", ["1"], ['"a"']),
    "dependentRequired": ({**RECORD, "dependentRequired": {"a": ["b"]}}, "$: dependentRequired", ['{"a": 1}'], ["1"]),
    "dependentSchemas": ({**RECORD, "dependentSchemas": {"a": False}}, "$: dependentSchemas", ['{"a": 1}'], ["1"]),
    "dependencies": ({**RECORD, "dependencies": {"a": ["b"]}}, "$: dependencies", ['{"a": 1}'], ["1"]),
    "propertyNames": (
        {**RECORD, "patternProperties": {"^a": {}}, "propertyNames": {"enum": ["a"]}},
        "$: propertyNames",
        ['{"b": 1}'],
        ['{"b": "c"}'],
    ),
    "unevaluatedProperties": (
        {"allOf": [RECORD], "unevaluatedProperties": False},
        "$: unevaluatedProperties",
        ['{"a": 1}'],
        ["1"],
    ),
    "maximum": ({"type": "number", "maximum": 1e20, "minimum": 0}, "$: maximum 1e+20", ["1.5"], ["-1"]),
    "format": ({**TEXT, "format": "color"}, "$: format 'color'", ['"red"'], ["1"]),
    "pattern": ({**TEXT, "pattern": "^(?!a)", "maxLength": 3}, "$: pattern with look-around", ['"ab"'], ['"abcd"']),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("schema", "matching", "others"), ENFORCED.values(), ids=ENFORCED)
def test_what_a_keyword_demands_is_enforced(
    schema: dict[str, Any], matching: list[str], others: list[str], strict: bool
) -> None:
    lowered = lower(StructuredOutputsParams(json=schema), {}, strict=strict)

    check(lowered.grammar.text)
    assert lowered.warnings == ()
    assert [text for text in matching if not accepts(lowered.grammar, text)] == []
    assert [text for text in others if accepts(lowered.grammar, text)] == []


@pytest.mark.parametrize(("schema", "named", "matching", "others"), NOT_ENFORCED.values(), ids=NOT_ENFORCED)
def test_what_is_not_enforced_leaves_its_own_schema_alone(
    schema: dict[str, Any], named: str, matching: list[str], others: list[str]
) -> None:
    lowered = lower(StructuredOutputsParams(json=schema), {})

    assert lowered.warnings == (f"{named} is not enforced",)
    assert [text for text in matching if not accepts(lowered.grammar, text)] == []
    assert [text for text in others if accepts(lowered.grammar, text)] == []
    with pytest.raises(GrammarError) as refused:
        lower(StructuredOutputsParams(json=schema), {}, strict=True)
    assert str(refused.value) == f"{named} is not supported"


def test_the_table_is_long_enough() -> None:
    assert 2 * len(ENFORCED) + 2 * len(NOT_ENFORCED) >= 60


UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"items": {"properties": {"tags": UNIQUE}}}}, "$.items.tags"),
        ({"properties": {"a b": UNIQUE}}, '$["a b"]'),
        ({"properties": {"é": UNIQUE}}, "$.é"),
        ({"properties": {"a": {"items": UNIQUE}}}, "$.a[*]"),
        ({"prefixItems": [{}, UNIQUE]}, "$[1]"),
        ({"items": [{}, UNIQUE]}, "$[1]"),
        ({"additionalProperties": UNIQUE}, "$.*"),
        ({"patternProperties": {"^a": UNIQUE}}, "$.*"),
        ({"anyOf": [{"type": "null"}, {"allOf": [UNIQUE]}]}, "$"),
        ({"properties": {"a": {"$ref": "#/$defs/Tags"}}, "$defs": {"Tags": UNIQUE}}, "$.a"),
        ({"$ref": "#tags", "$defs": {"Tags": {"$anchor": "tags", **UNIQUE}}}, "$"),
        ({"properties": {"a" * 60: UNIQUE}}, f'$["{"a" * 50}\\u2026"]'),
    ],
)
def test_a_path_is_that_of_the_value(schema: dict[str, Any], path: str) -> None:
    assert lower(StructuredOutputsParams(json=schema), {}).warnings == (f"{path}: uniqueItems is not enforced",)


def test_what_applies_to_no_value_is_not_looked_at() -> None:
    schema = {"type": "string", "$defs": {"unused": UNIQUE}, "default": UNIQUE, "x-note": UNIQUE}

    lowered = lower(StructuredOutputsParams(json=schema), {}, strict=True)

    check(lowered.grammar.text)
    assert lowered.warnings == ()


def test_a_schema_that_contains_itself_has_one_warning() -> None:
    node = {"properties": {"next": {"$ref": "#"}, "tags": UNIQUE}}
    assert lower(StructuredOutputsParams(json=node), {}).warnings == ("$.tags: uniqueItems is not enforced",)


def test_an_impossible_property_that_is_required_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}
    with pytest.raises(GrammarError, match="required property 'a' is unsatisfiable"):
        check(lower(StructuredOutputsParams(json=schema), {}).grammar.text)


def test_names_that_would_write_a_schema_too_often_are_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(20):
        names = {"enum": [f"name {number}" for number in range(10)]}
        schema = {"type": "object", "propertyNames": names, "additionalProperties": schema}
    with pytest.raises(GrammarError, match="too many property names"):
        lower(StructuredOutputsParams(json=schema), {})


def test_values_of_any_type_are_answered() -> None:
    values: list[Any] = [
        None,
        True,
        False,
        0,
        1.5,
        "a",
        [],
        ["a"],
        [{}],
        {},
        {"a": 1},
        {"a": [1]},
        {"type": 1},
        10**400,
    ]
    keywords = ["contains", "minContains", "if", "then", "not", "uniqueItems", "propertyNames", "dependentRequired"]
    keywords += ["dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"]
    keywords += ["items", "prefixItems", "anyOf", "enum", "required", "type", "const", "$defs", "minimum", "maxItems"]
    for keyword in keywords:
        for value in values:
            for strict in (True, False):
                schema = json.dumps({"type": ["object", "array", "integer"], keyword: value})
                with suppress(GrammarError):  # and nothing else is raised
                    check(lower(StructuredOutputsParams(json=schema), {}, strict=strict).grammar.text)
