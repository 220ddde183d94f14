"""The schema of an object as a list of properties, for the formats whose grammar has a rule for each."""

from collections.abc import Mapping
from dataclasses import dataclass

from proa.grammar import GrammarError
from proa_gateway.parsing.schema_types import Schema
from proa_gateway.parsing.string_grammar import ANNOTATIONS

_DEFINITIONS = ("$defs", "definitions")
_KNOWN = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *_DEFINITIONS, *ANNOTATIONS}


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    schema: Schema
    is_required: bool


def properties(schema: Schema) -> list[Property] | None:
    """In the schema's order, then those that are required and have no schema. None: any. Properties that the schema
    allows without a name are left out if others have one. Raises `GrammarError` for what a list cannot express."""
    for keyword in schema:
        if keyword not in _KNOWN:
            raise GrammarError(f"{keyword} is not supported for an object in this format of tool calls")
    named = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(named, Mapping) or not isinstance(required, list):
        raise GrammarError("properties must be an object, required an array")
    others = schema.get("additionalProperties", False)
    if not named and not required and others is not False:
        if others not in (True, {}):
            raise GrammarError("additionalProperties with a schema is not supported in this format of tool calls")
        return None
    all_schemas = {**named, **{name: others for name in required if name not in named}}
    return [Property(name, as_schema(value), name in required) for name, value in all_schemas.items()]


def as_schema(schema: object) -> Schema:
    if schema is False:
        raise GrammarError("no value can match the JSON schema false")
    return schema if isinstance(schema, Mapping) else {}


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """The schema with what its references lead to."""
    return {**{name: root[name] for name in _DEFINITIONS if name in root}, **schema}
