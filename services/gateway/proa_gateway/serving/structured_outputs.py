"""Structured outputs: the request fields that constrain the output, with the names of OpenAI, vLLM and SGLang, and the
constraint that they make.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError, to_json

from proa.contract import StructuredOutputsParams
from proa_gateway.errors import InvalidRequest

# Fields at the top of a request, and those of `StructuredOutputsParams` that they stand for.
_TOP_LEVEL = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must match."""

    param: str  # the request's field, for errors
    params: StructuredOutputsParams
    strict: bool = False  # refuse a JSON schema that can be enforced only in part


def _json_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | bool):
        raise PydanticCustomError("invalid_type", "must be an object, a boolean or a string that holds JSON")
    try:
        return to_json(value, inf_nan_mode="constants").decode()  # in a third of the time of `json.dumps`
    except ValueError:
        pass  # it refuses lone surrogates, and fewer levels than `json.dumps`
    try:
        return json.dumps(value)
    except RecursionError:
        raise PydanticCustomError("invalid_value", "is nested too deeply") from None


JsonText = Annotated[
    str,
    BeforeValidator(_json_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}),
]
"""A JSON schema or structural tag as text, whether it was sent as text or as JSON."""


class JsonSchemaFormat(BaseModel):
    """`strict`: refuse a schema that can be enforced only in part."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    description: str | None = None
    schema_: JsonText = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's, and vLLM's structural tags: `format`, or `structures` and `triggers` in their old form."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    triggers: Annotated[list[str], Field(fail_fast=True)] | None = None
    _structural_tag: str = PrivateAttr("")  # set by `_check`

    @property
    def structural_tag(self) -> str:
        """The structural tag as text. Only for that type."""
        return self._structural_tag

    @model_validator(mode="after")
    def _check(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("missing", "type json_schema needs the field json_schema")
        if self.type == "structural_tag":
            if (self.format is None) == (self.structures is None):
                message = "type structural_tag needs either format, or structures and triggers"
                raise PydanticCustomError("missing", message)
            old = {"structures": self.structures, "triggers": self.triggers}
            self._structural_tag = _json_text(old if self.format is None else {"format": self.format})
        return self


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`."""

    model_config = ConfigDict(extra="allow")

    json_: JsonText | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = Field(None, description="In Lark or EBNF.")
    json_object: bool | None = None
    structural_tag: JsonText | None = None
    whitespace_pattern: str | None = Field(None, description="Regex of the whitespace between the tokens of JSON.")
    disable_any_whitespace: bool | None = Field(None, description="Default: JSON has one space after , and :")
    disable_additional_properties: bool | None = Field(
        None, description="false: a JSON schema without additionalProperties allows any others. Default: true"
    )


class GrammarFields(BaseModel):
    """SGLang's names of constraints."""

    json_schema: JsonText | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: JsonText | None = None


class ConstraintFields(GrammarFields):
    """At most one of these may constrain the output. `format_field`: what errors call `response_format`."""

    format_field: ClassVar[str] = "response_format"

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # of vLLM before 0.12
    guided_json: JsonText | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @cached_property
    def constraint(self) -> Constraint | None:
        """Raises `InvalidRequest` if several fields constrain the output."""
        given = self._given()
        if len(given) > 1:
            message = f"Only one field may constrain the output, the request has {' and '.join(given)}."
            raise InvalidRequest(message, param=list(given)[1])
        options = self.structured_outputs
        whitespace = options.whitespace_pattern if options is not None else None
        for param, form in given.items():
            try:
                params = StructuredOutputsParams(
                    whitespace_pattern=whitespace or self.guided_whitespace_pattern or None,
                    disable_any_whitespace=bool(options and options.disable_any_whitespace),
                    disable_additional_properties=options is None or options.disable_additional_properties is not False,
                    **form,
                )
            except ValueError as error:
                raise InvalidRequest(f"{param}: {error}.", param=param) from None
            return Constraint(param, params, strict=_is_strict(self.response_format))
        return None

    def _given(self) -> dict[str, dict[str, Any]]:
        """The constraints by their fields, each as an argument of `StructuredOutputsParams`."""
        given: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and self.response_format.type != "text":
            given[self.format_field] = _of_response_format(self.response_format)
        if self.structured_outputs is not None:
            given |= {f"structured_outputs.{name}": {name: value} for name, value in _forms(self.structured_outputs)}
        for field, name in _TOP_LEVEL.items():
            if value := getattr(self, field):
                given[field] = {name: tuple(value) if name == "choice" else value}
        return given


def _of_response_format(response_format: ResponseFormat) -> dict[str, Any]:
    if response_format.json_schema is not None and response_format.type == "json_schema":
        return {"json": response_format.json_schema.schema_}
    if response_format.type == "structural_tag":
        return {"structural_tag": response_format.structural_tag}
    return {"json_object": True}


def _forms(options: StructuredOutputs) -> list[tuple[str, Any]]:
    forms = {
        "json": options.json_,
        "regex": options.regex,
        "choice": None if options.choice is None else tuple(options.choice),
        "grammar": options.grammar,
        "json_object": options.json_object or None,
        "structural_tag": options.structural_tag,
    }
    return [(name, value) for name, value in forms.items() if value is not None]


def _is_strict(response_format: ResponseFormat | None) -> bool:
    return bool(response_format and response_format.json_schema and response_format.json_schema.strict)
