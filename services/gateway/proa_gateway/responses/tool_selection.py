"""`tool_choice` of the Responses API."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from proa_gateway.errors import InvalidRequest
from proa_gateway.openai.tools import Tool, ToolChoice, ToolMode, wrong_tool_choice
from proa_gateway.parsing.tool import NamedTool
from proa_gateway.responses.tools import Function


@dataclass(frozen=True, slots=True)
class ToolSelection:
    """`sent`: the field as it was sent. `allowed`: names of the tools that may be called; None: all of them.

    A function in a namespace may be named without it, as in vLLM.
    """

    sent: object
    mode: ToolChoice
    allowed: frozenset[str] | None = None

    def tools(self, functions: Sequence[Function]) -> list[Tool]:
        if self.allowed is None:
            return [function.tool for function in functions]
        names = {flat for name in self.allowed for flat in _flat_names(name, functions)}
        return [function.tool for function in functions if function.call_name.flat in names]

    def choice(self, functions: Sequence[Function]) -> ToolChoice:
        """Raises `InvalidRequest` for a name that functions of several namespaces have."""
        if not isinstance(self.mode, NamedTool):
            return self.mode
        names = _flat_names(self.mode.name, functions) or [self.mode.name]
        if len({*names}) > 1:
            message = f"tool_choice names a function of several namespaces: {', '.join(names)}."
            raise InvalidRequest(message, param="tool_choice")
        return NamedTool(names[0])


def _flat_names(name: str, functions: Sequence[Function]) -> list[str]:
    """Of the function that the model knows by this name, else of those that have it in a namespace."""
    names = [function.call_name for function in functions]
    return [name] if name in {each.flat for each in names} else [each.flat for each in names if each.name == name]


def _selection(value: object) -> ToolSelection:
    if value is None or value in get_args(ToolMode):
        mode = cast(ToolMode, value or "auto")
        return ToolSelection(mode, mode)
    match value:
        case {"type": "function", "name": str(name)}:
            return ToolSelection(value, NamedTool(name))
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": [*tools]}:
            return ToolSelection(value, cast(ToolMode, mode), frozenset(_name(tool) for tool in tools))
    raise wrong_tool_choice(value, _NAME)


_NAME = '{"type": "function", "name": …}'


def _name(tool: Any) -> str:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
    raise PydanticCustomError("invalid_value", f"must have {_NAME} in its tools")


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
