"""The body of `POST /v1/responses`, with its tools."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.apis.responses.items import InputItems, Item, additional_tools, is_unreadable_compaction
from proa_gateway.apis.responses.tools import (
    Function,
    ToolParams,
    ToolSelection,
    ToolSelectionField,
    functions_of,
    left_out_of,
)
from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.fields import Count, Effort, Name, TemplateVariables, Text, check_json
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.ignored_fields import REFUSED as REFUSED_BY_ALL
from proa_gateway.serving.ignored_fields import REFUSED_IN_CHAT, THINKING_BUDGET, Refused
from proa_gateway.serving.structured_outputs import ResponseFormat
from proa_gateway.serving.tools.offers import UNREADABLE_COMPACTION, OfferedTool, offered_fields
from proa_gateway.serving.tools.tool import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
# What else `include` may name. The reasoning of an answer is readable; other items and parts do not occur.
_INCLUDED_ALREADY = frozenset(
    {
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)
_NO_LOGPROBS = Refused("use include and top_logprobs")
# Some of these are fields of `GenerationRequest`.
REFUSED: Mapping[str, Refused] = {
    **REFUSED_BY_ALL,
    **REFUSED_IN_CHAT,
    "thinking_token_budget": THINKING_BUDGET,
    "prompt": Refused("prompt templates are not stored"),
    "conversation": Refused("conversations are not stored; use previous_response_id"),
    "context_management": Refused("items of the input are never dropped"),
    "truncation": Refused("input that is too long is refused", neutral=("disabled",)),
    "messages": Refused("use input"),
    "system": Refused("use instructions"),
    "max_tokens": Refused("use max_output_tokens"),
    "max_completion_tokens": Refused("use max_output_tokens"),
    "response_format": Refused("use text.format"),
    "reasoning_effort": Refused("use reasoning.effort"),
    "n": Refused("a response has one output", neutral=(1,)),
    "best_of": Refused("a response has one output", neutral=(1,)),
    "logprobs": _NO_LOGPROBS,
    "prompt_logprobs": _NO_LOGPROBS,
    "return_token_ids": Refused("responses have no token ids"),
    "enable_response_messages": Refused("use GET /v1/responses/{id}/input_items"),
    "previous_input_messages": Refused("use previous_response_id or input"),
}
NO_EFFECT = frozenset({"max_tool_calls", "include_obfuscation"})
MAX_REPEATED = 4 * 2**20


def _num_characters(value: object) -> int:
    """Count the characters of all texts in a JSON value."""
    rest, count = [value], 0
    while rest:
        entry = rest.pop()
        if isinstance(entry, str):
            count += len(entry)
        elif isinstance(entry, dict):
            count += sum(map(len, entry))
            rest += entry.values()
        elif isinstance(entry, list):
            rest += entry
    return count


def _check_repeated(value: object) -> object:
    """Raises `PydanticCustomError`."""
    if _num_characters(value) > MAX_REPEATED:
        message = "must not have more than {limit} characters: the response repeats them"
        raise PydanticCustomError("invalid_value", message, {"limit": MAX_REPEATED})
    return check_json(value)


Repeated = BeforeValidator(_check_repeated)
"""A field that the response repeats as it was sent."""


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "TextFormat":
        if self.type == "json_schema" and self.schema_ is None:
            raise PydanticCustomError("missing", "type json_schema needs the field schema")
        return self

    def response_format(self) -> ResponseFormat:
        """Return the format as the field `response_format` of chat completions."""
        fields = self.model_dump(by_alias=True, exclude_unset=True)
        kind = fields.pop("type")
        return ResponseFormat.model_validate({"type": kind, "json_schema": fields if kind == "json_schema" else None})


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ReasoningConfig(BaseModel):
    """`summary` and `generate_summary` have no effect: the response has the reasoning itself."""

    model_config = ConfigDict(extra="allow")

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(GenerationRequest):
    """`store`: keep the response, for `previous_response_id`. `background`: answer before it is generated."""

    format_field: ClassVar[str] = "text.format"

    input: InputItems
    instructions: Text | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[ToolParams | None, Repeated] = None
    tool_choice: Annotated[ToolSelectionField, Repeated] = ToolSelection("auto", "auto")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call. Default: true.")
    text: Annotated[TextConfig | None, Repeated] = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[Name], Field(max_length=64, fail_fast=True)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    store: bool | None = Field(None, description="Default: true.")
    background: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(None, description="No effect.")
    prompt_cache_key: Name | None = Field(None, description="Like `session_id`, which comes first.")
    safety_identifier: Name | None = Field(None, description="No effect.")

    # vLLM's extra fields
    include_reasoning: bool | None = Field(None, description="False: the answer does not show it. Default: true.")
    chat_template_kwargs: TemplateVariables | None = None

    def functions(self, history: Sequence[Item]) -> list[Function]:
        """All functions, those of namespaces included. One that an item of `history` or of the input has replaces that
        of the same name in `tools` or in an earlier item. Raises `InvalidRequest` for too many."""
        items = functions_of(additional_tools([*history, *self.input]))
        replaced = {function.call_name.flat: function for function in items}
        given = [each for each in functions_of(self.tools or ()) if each.call_name.flat not in replaced]
        functions = [*given, *replaced.values()]
        if len(functions) > MAX_TOOLS:
            raise InvalidRequest(f"There are {len(functions)} tools; the limit is {MAX_TOOLS}.", param="tools")
        return functions

    @property
    def offered_tools(self) -> list[OfferedTool]:
        """The tools that are left out, those of namespaces included."""
        return list(left_out_of([*(self.tools or ()), *additional_tools(self.input)]))

    @property
    def warnings(self) -> list[str]:
        """About items that are left out."""
        return [UNREADABLE_COMPACTION] if any(is_unreadable_compaction(item) for item in self.input) else []

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Unknown fields, and those of `GenerationRequest` that responses do not support, by their path in the body."""
        others = {name: getattr(self, name) for name in REFUSED if name in self.model_fields_set}
        unknown: dict[str, object] = {
            f"include.{name}": True for name in set(self.include or ()) - _INCLUDED_ALREADY - {LOGPROBS}
        }
        if self.top_logprobs and not self.wants_logprobs:
            unknown["top_logprobs"] = self.top_logprobs
        fields = super().extra_fields | others | unknown | offered_fields(self.offered_tools)
        return {name: value for name, value in fields.items() if name not in NO_EFFECT}

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def keeps_response(self) -> bool:
        return self.store is not False

    def generation_request(self) -> GenerationRequest:
        """Return a copy that has the output's constraint in `response_format`, as in all APIs."""
        text_format = self.text.format if self.text else None
        return self.model_copy(update={"response_format": text_format.response_format() if text_format else None})
