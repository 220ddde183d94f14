"""The schemas that Zod 4, zod-to-json-schema and Pydantic write for their types are enforced in strict mode."""

import datetime
import enum
import json
import uuid
from typing import Annotated, Any, Literal

import pytest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, FilePath, PositiveInt, SecretStr, TypeAdapter, create_model

from proa.contract import StructuredOutputsParams
from proa.grammar import check, lower
from support.grammars import accepts

UUID = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
_HEX = "[0-9a-fA-F]"
_UUID = f"^({_HEX}{{8}}-{_HEX}{{4}}-[1-8]{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}|0{{8}}(?:-0{{4}}){{3}}-0{{12}})$"
_LONG, _SHORT = "(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)"
_DAY = rf"\d{{4}}-(?:{_LONG}|{_SHORT}|(?:02)-(?:0[1-9]|1\d|2[0-8]))"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?"
_SAFE = 9_007_199_254_740_991

# A type's schema, a value that matches and one that does not.
ZOD_4: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "string": ({"type": "string", "minLength": 1, "maxLength": 9}, "tree", ""),
    "email": (
        {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([a-z]+\.)+[a-z]{2,}$",
        },
        "ann.lee@example.org",
        "ann..lee@example.org",
    ),
    "url": ({"type": "string", "format": "uri"}, "http://example.org/a", "a b"),
    "uuid": ({"type": "string", "format": "uuid", "pattern": _UUID}, UUID, UUID[:-1]),
    "datetime": (
        {"type": "string", "format": "date-time", "pattern": f"^{_DAY}T(?:{_CLOCK}(?:Z))$"},
        "2026-01-31T12:00:00Z",
        "2026-02-31T12:00:00Z",
    ),
    "date": ({"type": "string", "format": "date", "pattern": f"^{_DAY}$"}, "2026-01-31", "2026-13-31"),
    "duration": (
        {
            "type": "string",
            "format": "duration",
            "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        },
        "P1DT2H",
        "PT",
    ),
    "hostname": (
        {
            "type": "string",
            "format": "hostname",
            "pattern": r"^(?=.{1,253}\.?$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9]+)*\.?$",
        },
        "example.org",
        "-a",
    ),
    "ipv4": ({"type": "string", "format": "ipv4", "pattern": r"^(?:\d{1,3}\.){3}\d{1,3}$"}, "10.0.0.1", "10.0.0.256"),
    "cuid": ({"type": "string", "format": "cuid", "pattern": "^[cC][0-9a-z]{6,}$"}, "c123456", "x123456"),
    "base64": (
        {
            "type": "string",
            "format": "base64",
            "contentEncoding": "base64",
            "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
        },
        "YQ==",
        "Y",
    ),
    "startsWith": ({"type": "string", "format": "starts_with", "pattern": r"^a\.b.*"}, "a.bc", "ab"),
    "int": ({"type": "integer", "minimum": -_SAFE, "maximum": _SAFE}, 7, 1.5),
    "positive": ({"type": "integer", "exclusiveMinimum": 0, "maximum": _SAFE}, 1, 0),
    "number": ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 7}, 0.5, 7),
    "float64": ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, 1.5, "a"),
    "multipleOf": ({"type": "number", "multipleOf": 0.25}, 1.25, 1.3),
    "literal": ({"type": "number", "const": 5}, 5, 6),
    "enum": ({"type": "string", "enum": ["a", "b"]}, "a", "c"),
    "nullable": ({"type": ["string", "null"]}, None, 1),
    "never": (
        {
            "type": "object",
            "properties": {"a": {"not": {}}, "b": {"type": "string"}},
            "required": ["b"],
            "additionalProperties": False,
        },
        {"b": ""},
        {"a": 1, "b": ""},
    ),
    "unknown": ({}, [1, "a"], ...),
    "array": ({"minItems": 1, "maxItems": 3, "type": "array", "items": {"type": "string"}}, ["a"], []),
    "tuple": (
        {
            "type": "array",
            "prefixItems": [{"type": "string"}, {"type": "number"}],
            "items": False,
            "minItems": 2,
            "maxItems": 2,
        },
        ["a", 1],
        ["a"],
    ),
    "record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        {"a": 1},
        {"a": "b"},
    ),
    "record of an enum": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "number"},
            "required": ["a", "b"],
        },
        {"a": 1, "b": 2},
        {"a": 1},
    ),
    "record of literals": (
        {
            "type": "object",
            "propertyNames": {"anyOf": [{"type": "string", "const": "a"}, {"type": "string", "const": "b"}]},
            "additionalProperties": {"type": "string"},
        },
        {"b": "x"},
        {"c": "x"},
    ),
    "record of uuids": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "format": "uuid", "pattern": _UUID},
            "additionalProperties": {"type": "boolean"},
        },
        {UUID: True},
        {"a": True},
    ),
    "record of numbers": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": r"^-?\d+(?:\.\d+)?$"},
            "additionalProperties": {"type": "string"},
        },
        {"-1.5": "a"},
        {"a": "a"},
    ),
    "loose object": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": {}},
        {"a": "x", "b": 1},
        {"b": 1},
    ),
    "discriminated union": (
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"type": "string", "const": kind}},
                    "required": ["kind"],
                    "additionalProperties": False,
                }
                for kind in ("cat", "dog")
            ]
        },
        {"kind": "dog"},
        {"kind": "cow"},
    ),
    "recursive": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"parts": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                    "required": ["parts"],
                    "additionalProperties": False,
                }
            },
        },
        {"parts": [{"parts": []}]},
        {"parts": [1]},
    ),
}

ZOD_TO_JSON_SCHEMA: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "ip": ({"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}, "10.0.0.1", "ten"),
    "tuple with a rest": (
        {"type": "array", "minItems": 1, "items": [{"type": "string"}], "additionalItems": {"type": "boolean"}},
        ["a", True],
        ["a", 1],
    ),
    "map": (
        {
            "type": "array",
            "maxItems": 125,
            "items": {"type": "array", "items": [{"type": "string"}, {"type": "number"}], "minItems": 2, "maxItems": 2},
        },
        [["a", 1]],
        [["a"]],
    ),
    "record of an enum": (
        {"type": "object", "additionalProperties": {"type": "number"}, "propertyNames": {"enum": ["a", "b"]}},
        {"b": 1},
        {"c": 1},
    ),
    "record of texts": (
        {"type": "object", "additionalProperties": {"type": "number"}, "propertyNames": {"minLength": 1}},
        {"b": 1},
        {"": 1},
    ),
    "record of uuids": (
        {"type": "object", "additionalProperties": {"type": "boolean"}, "propertyNames": {"format": "uuid"}},
        {UUID: True},
        {"a": True},
    ),
    "intersection": (
        {
            "allOf": [
                {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]} for name in ("a", "b")
            ]
        },
        {"a": "", "b": ""},
        {"a": ""},
    ),
}


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Node(BaseModel):
    parts: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    age: int


class Dog(BaseModel):
    kind: Literal["dog"]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


PYDANTIC: dict[str, tuple[Any, Any, Any]] = {
    "enum": (Colour, "red", "blue"),
    "dict of an enum": (dict[Colour, int], {"red": 1}, {"blue": 1}),
    "dict of literals": (dict[Literal["a", "b"], float], {"a": 1.5}, {"c": 1.5}),
    "dict of patterns": (dict[Annotated[str, Field(pattern="^k_")], int], {"k_1": 1}, {"a": 1}),
    "dict of uuids": (dict[uuid.UUID, int], {UUID: 1}, {"a": 1}),
    "dict of dates": (dict[datetime.date, int], {"2026-01-31": 1}, {"a": 1}),
    "dict": (dict[int, str], {"1": "a"}, {"1": 1}),
    "optional": (int | None, None, "a"),
    "positive": (PositiveInt, 1, 0),
    "bounded": (Annotated[int, Field(ge=0, lt=8, multiple_of=2)], 6, 8),
    "text": (Annotated[str, Field(min_length=1, max_length=5, pattern="^a")], "abc", "b"),
    "datetime": (datetime.datetime, "2026-01-31T12:00:00Z", "now"),
    "time": (datetime.time, "12:00:00Z", "noon"),
    "timedelta": (datetime.timedelta, "P1DT2H", "long"),
    "uuid": (uuid.UUID, UUID, "a"),
    "url": (AnyUrl, "http://example.org/", "a b"),
    "secret": (SecretStr, "a", 1),
    "bytes": (bytes, "a", 1),
    "path": (FilePath, "/tmp/a", 1),
    "tuple": (tuple[int, str], [1, "a"], ["a", 1]),
    "recursive": (Node, {"parts": [{"parts": []}]}, {"parts": [1]}),
    "discriminated union": (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": "dog"}, {"kind": "cow"}),
    "closed": (Closed, {"a": 1}, {"a": 1, "b": 2}),
    "any": (Any, {"a": [1]}, ...),
}


@pytest.mark.parametrize(("type_", "matching", "other"), PYDANTIC.values(), ids=PYDANTIC)
def test_of_pydantic(type_: Any, matching: Any, other: Any) -> None:
    model = create_model("Answer", value=(type_, ...))
    is_enforced(TypeAdapter(model).json_schema(), {"value": matching}, ... if other is ... else {"value": other})


@pytest.mark.parametrize(("schema", "matching", "other"), ZOD_4.values(), ids=ZOD_4)
def test_of_zod_4(schema: dict[str, Any], matching: Any, other: Any) -> None:
    is_enforced({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, matching, other)


@pytest.mark.parametrize(("schema", "matching", "other"), ZOD_TO_JSON_SCHEMA.values(), ids=ZOD_TO_JSON_SCHEMA)
def test_of_zod_to_json_schema(schema: dict[str, Any], matching: Any, other: Any) -> None:
    is_enforced({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, matching, other)


def is_enforced(schema: dict[str, Any], matching: Any, other: Any) -> None:
    """Assert it. `other` ...: all values match."""
    lowered = lower(StructuredOutputsParams(json=schema), {}, strict=True)
    check(lowered.grammar.text)
    assert accepts(lowered.grammar, json.dumps(matching))
    assert other is ... or not accepts(lowered.grammar, json.dumps(other))
