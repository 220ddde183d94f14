"""Tools of responses: functions and custom tools, also in namespaces, and which of them may be called."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.errors import InvalidRequest
from proa_gateway.parsing.format import NamedTool
from proa_gateway.serving.fields import TemplateValue, Text
from proa_gateway.serving.tools.offers import Offered, OfferedTool, by_type
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
_CALLABLE = {"function": "<function>", "custom": "<custom>"}  # types of tools, and their tags


@dataclass(frozen=True, slots=True)
class CallName:
    """The name of a function that may be called. `flat`: the one that the model gets to know, as in vLLM."""

    name: str
    namespace: str | None = None  # None: it is in none

    @property
    def flat(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"

    def fields(self) -> dict[str, str]:
        """Return the fields of a call that name its function."""
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}


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


ToolParams = Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)]


def functions_of(tools: Iterable[ToolParam]) -> Iterator[Function]:
    for tool in tools:
        if isinstance(tool, FunctionParam | CustomParam):
            yield tool.function()
        elif isinstance(tool, NamespaceParam):
            yield from (function.function(tool.name) for function in tool.functions)


def left_out_of(tools: Iterable[ToolParam]) -> Iterator[OfferedTool]:
    """The tools of other types, those in namespaces included."""
    for tool in tools:
        inner = tool.tools if isinstance(tool, NamespaceParam) else [tool]
        yield from (each for each in inner if isinstance(each, OfferedTool))


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
