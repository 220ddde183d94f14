"""Tools of the Responses API. Its functions have no object of their own within a tool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from proa_gateway.openai.fields import TemplateValue, Text, known_types
from proa_gateway.openai.tools import Tool, ToolChoice, ToolMode, ToolName
from proa_gateway.parsing.tool import NamedTool


class FunctionParam(BaseModel):
    """`strict`: calls must match the schema of the parameters."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: dict[str, TemplateValue] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        function = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return Tool.model_validate({"type": "function", "function": function})


ToolParam = Annotated[FunctionParam, known_types("function")]


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """`sent`: the field as it was sent. `allowed`: names of the tools that may be called; None: all of them."""

    sent: object
    choice: ToolChoice
    allowed: frozenset[str] | None = None

    def tools(self, tools: Sequence[Tool]) -> list[Tool]:
        return [tool for tool in tools if self.allowed is None or tool.function.name in self.allowed]


def _selection(value: object) -> ToolSelection:
    if value is None or value in get_args(ToolMode):
        mode = cast(ToolMode, value or "auto")
        return ToolSelection(mode, mode)
    match value:
        case {"type": "function", "name": str(name)}:
            return ToolSelection(value, NamedTool(name))
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": [*tools]}:
            return ToolSelection(value, cast(ToolMode, mode), frozenset(_name(tool) for tool in tools))
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            message = "has the type {kind}: only function and allowed_tools are supported"
            raise PydanticCustomError("unsupported_parameter", message, {"kind": repr(kind[:40])})
    message = 'must be "none", "auto", "required", {"type": "function", "name": …} or allowed_tools'
    raise PydanticCustomError("invalid_value", message)


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
    raise PydanticCustomError("invalid_value", 'must have {"type": "function", "name": …} in its tools')


_FUNCTION = {
    "type": "object",
    "properties": {"type": {"enum": ["function"]}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"enum": ["allowed_tools"]},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _FUNCTION},
    },
    "required": ["type", "mode", "tools"],
}
ToolSelectionField = Annotated[
    ToolSelection,
    PlainValidator(_selection),
    WithJsonSchema({"anyOf": [{"enum": list(get_args(ToolMode))}, _FUNCTION, _ALLOWED, {"type": "null"}]}),
]
"""`tool_choice` of responses."""
