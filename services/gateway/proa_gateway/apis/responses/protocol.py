"""The body of `POST /v1/responses`, with its tools."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.apis.responses.items import CallName, InputItems, is_unreadable_compaction
from proa_gateway.errors import InvalidRequest
from proa_gateway.parsing.format import NamedTool
from proa_gateway.serving.fields import (
    Count,
    Effort,
    Name,
    TemplateValue,
    TemplateVariables,
    Text,
    check_json,
)
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.ignored_fields import REFUSED as REFUSED_BY_ALL
from proa_gateway.serving.ignored_fields import REFUSED_IN_CHAT, THINKING_BUDGET, Refused
from proa_gateway.serving.structured_outputs import ResponseFormat
from proa_gateway.serving.tools.offers import UNREADABLE_COMPACTION, Offered, OfferedTool, by_type, offered_fields
from proa_gateway.serving.tools.tool import (
    MAX_NAME,
    MAX_TOOLS,
    AllowedTools,
    CustomTool,
    InputFormat,
    Tool,
    ToolChoice,
    ToolChoiceForm,
    ToolName,
    grammar_of,
)

_FORM = ToolChoiceForm(is_nested=False)
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
    "text.verbosity": REFUSED_IN_CHAT["verbosity"],
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
_CALLABLE = {"function": "<function>", "custom": "<custom>"}  # types of tools, and their tags
NO_EFFECT = frozenset({"max_tool_calls", "include_obfuscation"})
MAX_REPEATED = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    call_name: CallName
    tool: Tool  # in the form of chat completions


class FunctionParam(BaseModel):
    """`strict`: calls must match the schema of the parameters."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: dict[Text, TemplateValue] | None = None
    strict: bool | None = None

    def function(self, namespace: str | None = None) -> Function:
        call_name = CallName(self.name, namespace)
        fields = self.model_dump(include={"description", "parameters", "strict"}, exclude_none=True)
        function = {"name": call_name.flat, **fields}
        return Function(call_name, Tool.model_validate({"type": "function", "function": function}))


class CustomParam(BaseModel):
    """A tool whose input is a text, which matches `format`."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"]
    name: ToolName
    description: Text | None = None
    format: InputFormat | None = None

    def function(self, namespace: str | None = None) -> Function:
        call_name = CallName(self.name, namespace)
        return Function(call_name, CustomTool.of(call_name.flat, self.description, grammar_of(self.format)))


_Callable = Annotated[FunctionParam, Tag("<function>")] | Annotated[CustomParam, Tag("<custom>")]


class NamespaceParam(BaseModel):
    """Functions and custom tools with a common first name. `description` has no effect: each tool has its own."""

    model_config = ConfigDict(extra="allow")

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: list[Annotated[_Callable | Offered, by_type(_CALLABLE)]]

    @model_validator(mode="after")
    def _check_names(self) -> "NamespaceParam":
        if any(len(CallName(tool.name, self.name).flat) > MAX_NAME for tool in self.functions):
            message = "has a function whose name, with that of the namespace, is longer than {most} characters"
            raise PydanticCustomError("invalid_value", message, {"most": MAX_NAME})
        return self

    @property
    def functions(self) -> list[FunctionParam | CustomParam]:
        return [tool for tool in self.tools if isinstance(tool, FunctionParam | CustomParam)]


ToolParam = Annotated[
    _Callable | Annotated[NamespaceParam, Tag("<namespace>")] | Offered,
    by_type({**_CALLABLE, "namespace": "<namespace>"}),
]


def functions_of(tools: Iterable[FunctionParam | CustomParam | NamespaceParam | OfferedTool]) -> Iterator[Function]:
    for tool in tools:
        if isinstance(tool, FunctionParam | CustomParam):
            yield tool.function()
        elif isinstance(tool, NamespaceParam):
            yield from (function.function(tool.name) for function in tool.functions)


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """Which tools may or must be called. A function in a namespace may be named without it, as in vLLM."""

    sent: object  # the field as it was sent
    parsed: ToolChoice | AllowedTools

    def tools(self, functions: Sequence[Function]) -> list[Tool]:
        """The tools that the model gets to know."""
        if not isinstance(self.parsed, AllowedTools):
            return [function.tool for function in functions]
        names = {flat for name in self.parsed.names for flat in _flat_names(name, functions)}
        return [function.tool for function in functions if function.call_name.flat in names]

    @property
    def left_out(self) -> Sequence[OfferedTool]:
        """Allowed tools of other types."""
        return self.parsed.left_out if isinstance(self.parsed, AllowedTools) else ()

    def choice(self, functions: Sequence[Function]) -> ToolChoice:
        """Raises `InvalidRequest` for a name that functions of several namespaces have."""
        if isinstance(self.parsed, AllowedTools):
            return self.parsed.mode
        if not isinstance(self.parsed, NamedTool):
            return self.parsed
        names = _flat_names(self.parsed.name, functions) or [self.parsed.name]
        if len({*names}) > 1:
            message = f"tool_choice names a function of several namespaces: {', '.join(names)}."
            raise InvalidRequest(message, param="tool_choice")
        return NamedTool(names[0])


def _flat_names(name: str, functions: Sequence[Function]) -> list[str]:
    """Return the flat name of the function that the model knows by this name, otherwise of each that has it in a
    namespace."""
    names = [function.call_name for function in functions]
    return [name] if name in {each.flat for each in names} else [each.flat for each in names if each.name == name]


ToolSelectionField = Annotated[
    ToolSelection,
    PlainValidator(lambda value: ToolSelection(value or "auto", _FORM.parse(value) or "auto")),
    WithJsonSchema(_FORM.schema),
]
"""`tool_choice` of responses."""


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
    tools: Annotated[Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None, Repeated] = None
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

    @property
    def functions(self) -> list[Function]:
        """All functions of `tools`, those of namespaces included."""
        return list(functions_of(self.tools or ()))

    @property
    def offered_tools(self) -> list[OfferedTool]:
        """The tools that are left out, those of namespaces included."""
        namespaces = [tool for tool in self.tools or () if isinstance(tool, NamespaceParam)]
        tools = [*(self.tools or ()), *(inner for namespace in namespaces for inner in namespace.tools)]
        return [tool for tool in tools if isinstance(tool, OfferedTool)]

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
