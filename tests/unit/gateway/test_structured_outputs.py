"""The constraint that a request's fields have."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from proa.contract import StructuredOutputsParams
from proa_gateway.apis.completions.protocol import CompletionRequest
from proa_gateway.errors import InvalidRequest
from proa_gateway.http.errors import validation_error_object
from proa_gateway.serving.structured_outputs import Constraint


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}
TEXT = compact(SCHEMA)
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
STRUCTURES = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]


def constraint(**fields: Any) -> Constraint | None:
    return CompletionRequest(prompt="Hi", **fields).constraint  # type: ignore[arg-type]


def response_format(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


@pytest.mark.parametrize(
    ("fields", "param", "form"),
    [
        (response_format("json_object"), "response_format", {"json_object": True}),
        (response_format("json_schema", json_schema={"name": "n", "schema": SCHEMA}), None, {"json": TEXT}),
        (response_format("json_schema", json_schema={"schema": SCHEMA}), "response_format", {"json": TEXT}),
        (response_format("structural_tag", format=TAG), None, {"structural_tag": compact({"format": TAG})}),
        (
            response_format("structural_tag", structures=STRUCTURES, triggers=["<f"]),
            "response_format",
            {"structural_tag": compact({"structures": STRUCTURES, "triggers": ["<f"]})},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", {"json": TEXT}),
        ({"structured_outputs": {"json": TEXT}}, "structured_outputs.json", {"json": TEXT}),
        ({"structured_outputs": {"json": True}}, "structured_outputs.json", {"json": "true"}),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", {"regex": "a+"}),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", {"regex": ""}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", {"choice": ("a", "b")}),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", {"choice": ()}),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", {"grammar": ""}),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", {"json_object": True}),
        (
            {"structured_outputs": {"structural_tag": {"format": TAG}}},
            "structured_outputs.structural_tag",
            {"structural_tag": compact({"format": TAG})},
        ),
        (
            {"structured_outputs": {"json": TEXT, "whitespace_pattern": " ?"}},
            "structured_outputs.json",
            {"json": TEXT, "whitespace_pattern": " ?"},
        ),
        (
            {**response_format("json_object"), "structured_outputs": {"disable_any_whitespace": True}},
            "response_format",
            {"json_object": True, "disable_any_whitespace": True},
        ),
        (
            {"guided_json": SCHEMA, "structured_outputs": {"disable_additional_properties": True}},
            "guided_json",
            {"json": TEXT, "disable_additional_properties": True},
        ),
        ({"guided_json": SCHEMA}, "guided_json", {"json": TEXT}),
        ({"guided_json": {}}, "guided_json", {"json": "{}"}),
        (
            {"guided_json": TEXT, "guided_whitespace_pattern": " "},
            "guided_json",
            {"json": TEXT, "whitespace_pattern": " "},
        ),
        ({"guided_regex": "a"}, "guided_regex", {"regex": "a"}),
        ({"guided_choice": ["a"]}, "guided_choice", {"choice": ("a",)}),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", {"grammar": 'root ::= "a"'}),
        ({"json_schema": TEXT}, "json_schema", {"json": TEXT}),
        ({"regex": "a"}, "regex", {"regex": "a"}),
        ({"ebnf": 'root ::= "a"'}, "ebnf", {"grammar": 'root ::= "a"'}),
        ({"structural_tag": '{"format": 1}'}, "structural_tag", {"structural_tag": '{"format": 1}'}),
    ],
)
def test_every_form_of_a_constraint(fields: dict[str, Any], param: str | None, form: dict[str, Any]) -> None:
    assert constraint(**fields) == Constraint(param or "response_format", StructuredOutputsParams(**form))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        response_format("text"),
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "whitespace_pattern": " "}},
        {"structured_outputs": {"disable_any_whitespace": True, "disable_additional_properties": False}},
        {"guided_json": "", "guided_regex": "", "guided_choice": [], "guided_grammar": ""},
        {"guided_whitespace_pattern": " "},
        {"json_schema": "", "regex": "", "ebnf": "", "structural_tag": ""},
    ],
)
def test_neutral_values_constrain_nothing(fields: dict[str, Any]) -> None:
    assert constraint(**fields) is None


@pytest.mark.parametrize(("strict", "expected"), [(True, True), (False, False), (None, False)])
def test_a_strict_schema_is_lowered_strictly(strict: bool | None, expected: bool) -> None:
    made = constraint(**response_format("json_schema", json_schema={"schema": SCHEMA, "strict": strict}))
    assert made is not None
    assert made.strict is expected


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        (
            {**response_format("json_object"), "structured_outputs": {"regex": "a"}},
            "response_format",
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "json": "{}"}},
            "structured_outputs.json",
            "structured_outputs.choice",
        ),
        ({"guided_json": {}, "ebnf": "x"}, "guided_json", "ebnf"),
    ],
)
def test_several_constraints_are_refused_by_name(fields: dict[str, Any], first: str, second: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the request has {first} and {second}") as raised:
        constraint(**fields)
    assert raised.value.param == second


def test_options_that_exclude_each_other_are_refused() -> None:
    options = {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}
    with pytest.raises(InvalidRequest, match="exclude each other"):
        constraint(structured_outputs=options)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (response_format("json_schema"), "response_format", "missing_required_parameter"),
        (
            response_format("json_schema", json_schema={"name": "n"}),
            "response_format.json_schema.schema",
            "missing_required_parameter",
        ),
        (response_format("structural_tag"), "response_format", "missing_required_parameter"),
        (response_format("structural_tag", format="invalid"), "response_format.format", "invalid_value"),
        (response_format("yaml"), "response_format.type", "invalid_value"),
        ({"response_format": "json"}, "response_format", "invalid_value"),
        ({"structured_outputs": {"regex": {"1": "a"}}}, "structured_outputs.regex", "invalid_value"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "invalid_value"),
        ({"guided_json": 5}, "guided_json", "invalid_value"),
    ],
)
def test_wrong_values_are_refused_by_the_path_of_their_field(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ValidationError) as raised:
        constraint(**fields)
    errors = [error | {"loc": ("body", *error["loc"])} for error in raised.value.errors()]
    error = validation_error_object(errors, fields)["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_a_tag_that_is_nested_too_deeply_to_be_written_is_refused() -> None:
    tag: dict[str, Any] = {}
    for _ in range(5000):
        tag = {"content": tag}
    for fields in (response_format("structural_tag", format=tag), {"guided_json": tag}):
        with pytest.raises(ValidationError, match="nested too deeply"):
            constraint(**fields)


def test_unknown_fields_of_a_constraint_are_extra_fields() -> None:
    fields = {
        "response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}, "scrict": True}},
        "structured_outputs": {"backend": "x"},
    }
    request = CompletionRequest(prompt="Hi", **fields)  # type: ignore[arg-type]
    expected = {"response_format.schema", "response_format.json_schema.scrict", "structured_outputs.backend"}
    assert request.extra_fields.keys() == expected


@pytest.mark.parametrize("value", ["\ud800", 10**40, float("inf"), [1e-7, None, True, "é\x00"]])
def test_the_text_of_a_schema_has_its_values(value: Any) -> None:
    schema = {"const": value}
    found = constraint(guided_json=schema)
    assert found is not None
    assert isinstance(found.params.json, str)
    assert json.loads(found.params.json) == schema


def test_the_text_of_a_schema_may_have_hundreds_of_levels() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"not": schema}
    found = constraint(guided_json=schema)
    assert found is not None
    assert isinstance(found.params.json, str)
    assert json.loads(found.params.json) == schema
