"""Request fields that constrain the output, with the names of OpenAI, vLLM and SGLang."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError, to_json


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
    _structural_tag: str = PrivateAttr("")

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


class ConstraintFields(BaseModel):
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

    # SGLang's
    json_schema: JsonText | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: JsonText | None = None
