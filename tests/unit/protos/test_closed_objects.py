"""Objects have only the properties that their schemas name, however schemas are combined."""

from typing import Any

import pytest

from proa.grammar import GrammarError
from support.grammars import accepts, lowered

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}
KIND = {"type": "object", "properties": {"kind": {}}}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        (A, ['{"a": 1}'], ['{"a": 1, "c": 1}', '{"c": 1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"c": 1}']),
        ({"type": "array", "items": A}, ['[{"a": 1}]'], ['[{"a": 1, "c": 1}]']),
        ({"allOf": [A, B]}, ['{"a": 1, "b": 1}'], ['{"a": 1, "b": 1, "c": 1}']),
        ({"allOf": [REF_A, B]}, ['{"a": 1, "b": 1}'], ['{"a": 1, "b": 1, "c": 1}']),
        ({"allOf": [REF_A]}, ['{"a": 1}'], ['{"a": 1, "c": 1}']),
        ({"anyOf": [A, B]}, ['{"a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}']),
        ({**KIND, "anyOf": [A, B]}, ['{"kind": 1, "a": 1}', '{"b": 1}'], ['{"a": 1, "b": 1}', '{"a": 1, "c": 1}']),
        ({**KIND, "oneOf": [REF_A, REF_B]}, ['{"kind": 1, "b": 1}'], ['{"kind": 1, "a": 1, "b": 1}']),
        ({**KIND, "anyOf": [{"required": ["x"]}, {"required": ["kind"]}]}, ['{"x": 1}'], ['{"x": 1, "c": 1}']),
        ({**KIND, **REF_A, "required": ["x"]}, ['{"kind": 1, "a": 1, "x": 1}'], ['{"a": 1, "c": 1, "x": 1}']),
        ({**REF_A, "required": ["x"]}, ['{"a": 1, "x": 1}'], ['{"a": 1, "c": 1, "x": 1}']),
        (NODE, ['{"next": {"next": null}}'], ['{"next": {"other": null}}']),
        ({"type": "object", "patternProperties": {"^x": {}}}, ['{"x": 1}'], ['{"y": 1}']),
    ],
)
def test_an_object_has_no_properties_that_its_schemas_do_not_name(
    schema: dict[str, Any], accepted: list[str], rejected: list[str]
) -> None:
    grammar = lowered(json={"$defs": {"A": A, "B": B}, **schema})

    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": {}},
        {**A, "additionalProperties": True},
        {"allOf": [REF_A, {"additionalProperties": True}]},
        {"additionalProperties": True, "anyOf": [REF_A, REF_B]},
        {"allOf": [REF_A, {"patternProperties": {"^c": {}}}]},
        {"type": "object", "patternProperties": {"^x": {}}, "required": ["a", "c"]},
        {"type": "object", "properties": {"a": {}}, "enum": [{"a": 1, "c": 1}]},
        {**A, "minProperties": 2},
    ],
)
def test_what_names_other_properties_in_another_way_stays_open(schema: dict[str, Any]) -> None:
    assert accepts(lowered(json={"$defs": {"A": A, "B": B}, **schema}), '{"a": 1, "c": 1}')


def test_a_definition_is_closed_where_it_is_used_alone_and_open_where_it_is_extended() -> None:
    defs = {"A": A, "Extended": {"allOf": [REF_A, B]}}
    schema = {"type": "object", "properties": {"alone": {"$ref": "#/$defs/Extended"}}, "$defs": defs}

    assert accepts(lowered(json=schema), '{"alone": {"a": 1, "b": 1}}')
    assert not accepts(lowered(json=schema), '{"alone": {"a": 1, "b": 1, "c": 1}}')


def test_properties_without_a_schema_come_in_the_order_in_which_they_are_required() -> None:
    grammar = lowered(json={"type": "object", "properties": {"a": {}}, "required": ["z", "a", "y"]})

    assert accepts(grammar, '{"a": 1, "z": 1, "y": 1}')


def test_json_schemas_own_meaning_is_an_option() -> None:
    assert accepts(lowered(json=A, disable_additional_properties=False), '{"a": 1, "c": 1}')


def test_schemas_that_combine_too_many_others_are_refused() -> None:
    names: dict[str, Any] = {f"property{number}": {} for number in range(1000)}
    choices: list[Any] = [{"properties": {f"choice{number}": {}}} for number in range(1000)]

    with pytest.raises(GrammarError, match="combines too many schemas"):
        lowered(json={"type": "object", "properties": names, "anyOf": choices})
