"""Tools of a request, in the form of chat completions, and which of them may or must be called.

The calls of a custom tool have a text as input, which may have to match a grammar. For the model such a tool is a
function with one argument, `input`. Open models were not trained on tools with grammars, so its description ends with
the grammar.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.parsing.format import INPUT, INPUT_SCHEMA, NamedTool, TextGrammar
from proa_gateway.parsing.json_text import quoted
from proa_gateway.serving.fields import TemplateValue, Text, known_types
from proa_gateway.serving.tools.offers import Offered, OfferedTool, by_type

MAX_NAME = 128
MAX_TOOLS = 1024  # OpenAI has 128
ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}$")]
_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


class AnyText(BaseModel):
    type: Literal["text"]


class GrammarDefinition(BaseModel):
    """`regex`: a regular expression that matches all of the input."""

    syntax: Literal["lark", "regex"]
    definition: Text


class GrammarFormat(BaseModel):
    """In chat completions."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


class FlatGrammarFormat(GrammarDefinition):
    """In responses."""

    type: Literal["grammar"]


ChatInputFormat = Annotated[
    Annotated[AnyText | GrammarFormat, Field(discriminator="type")], known_types("text", "grammar")
]
InputFormat = Annotated[
    Annotated[AnyText | FlatGrammarFormat, Field(discriminator="type")], known_types("text", "grammar")
]


def grammar_of(input_format: AnyText | GrammarFormat | FlatGrammarFormat | None) -> TextGrammar | None:
    """None: any text."""
    match input_format:
        case GrammarFormat(grammar=grammar):
            return TextGrammar(grammar.syntax, grammar.definition)
        case FlatGrammarFormat(syntax=syntax, definition=definition):
            return TextGrammar(syntax, definition)
    return None


def function_fields(name: str, description: str | None, grammar: TextGrammar | None) -> dict[str, Any]:
    """The function that a custom tool is for the model."""
    parts = [description] if description else []
    if grammar is not None:
        parts.append(f"The {INPUT} must match this {_SYNTAXES[grammar.syntax]}:\n{grammar.definition.strip()}")
    described: Mapping[str, object] = {"description": "\n\n".join(parts)} if parts else {}
    return {"name": name, **described, "parameters": INPUT_SCHEMA}


def call_arguments(text: str) -> str:
    """The arguments of the function that a custom tool is, as JSON text."""
    return f'{{"{INPUT}": {quoted(text)}}}'


class FunctionDefinition(BaseModel):
    """`parameters`: JSON schema of the arguments, an object; None: no arguments. `strict`: calls must match it."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TemplateValue]

    name: ToolName
    description: Text | None = None
    parameters: dict[Text, TemplateValue] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A function in the form of chat completions. Other APIs' tools are converted to it."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TemplateValue]

    type: Literal["function"]
    function: FunctionDefinition
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)  # what was sent, which the chat template gets

    @model_validator(mode="wrap")
    @classmethod
    def _keep_sent(cls, value: Any, handler: ModelWrapValidatorHandler["Tool"]) -> "Tool":
        tool = handler(value)
        if isinstance(value, dict):
            tool._sent = value
        return tool

    @property
    def grammar(self) -> TextGrammar | None:
        """Of the input of a custom tool. None: any text, or the tool is a function."""
        return None

    @property
    def is_enforced(self) -> bool:
        """Whether calls must match the tool, also if none is demanded."""
        return bool(self.function.strict) or self.grammar is not None

    def for_template(self) -> dict[str, Any]:
        """Return the tool as it was sent, in the same order of keys, without `strict`, which the gateway enforces."""
        function = {key: value for key, value in self._sent["function"].items() if key != "strict"}
        return {**self._sent, "function": function}

    def with_texts(self, change: Callable[[Any], Any]) -> "Tool":
        """A copy for the chat template. `change`: of the JSON that was sent."""
        tool = self.model_copy()
        tool._sent = change(self._sent)
        return tool


class CustomTool(Tool):
    """A tool whose calls have a text as input, as the function that it is for the model."""

    _grammar: TextGrammar | None = PrivateAttr(default=None)  # of the input; None: any text

    @classmethod
    def of(cls, name: str, description: str | None, grammar: TextGrammar | None) -> "CustomTool":
        tool = cls.model_validate({"type": "function", "function": function_fields(name, description, grammar)})
        tool._grammar = grammar
        return tool

    @property
    def grammar(self) -> TextGrammar | None:
        return self._grammar


class CustomDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: ToolName
    description: Text | None = None
    format: ChatInputFormat | None = None


class CustomToolParam(BaseModel):
    """A custom tool in chat completions."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"]
    custom: CustomDefinition

    def tool(self) -> CustomTool:
        return CustomTool.of(self.custom.name, self.custom.description, grammar_of(self.custom.format))


ToolField = Annotated[
    Annotated[Tool, Tag("<tool>")]
    | Annotated[CustomToolParam, AfterValidator(CustomToolParam.tool), Tag("<custom>")]
    | Offered,
    by_type({"function": "<tool>", "custom": "<custom>"}),
]
ToolMode = Literal["none", "auto", "required"]
ToolChoice = ToolMode | NamedTool


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """The model gets to know only the tools of these names."""

    mode: ToolMode  # never "none"
    names: frozenset[str]
    left_out: tuple[OfferedTool, ...] = ()  # entries of other types


@dataclass(frozen=True, slots=True)
class ToolChoiceForm:
    """How an API writes `tool_choice`: `{"type": "function", "name": …}`, a list of allowed tools, or a mode."""

    is_nested: bool  # the name is in an object `function`, and allowed tools are in an object `allowed_tools`

    def parse(self, value: object) -> ToolChoice | AllowedTools | None:
        """Raises `PydanticCustomError`."""
        if value is None or value in get_args(ToolMode):
            return cast(ToolMode | None, value)
        match value:
            case {"type": "function" | "custom"}:
                return NamedTool(self._name(value))
            case {"type": "allowed_tools", **fields}:
                match fields.get("allowed_tools") if self.is_nested else fields:
                    case {"mode": ("auto" | "required") as mode, "tools": [*tools]}:
                        return self._allowed(cast(ToolMode, mode), tools)
            case {"type": str(kind)}:
                message = "has the type {kind}: only the types function, custom and allowed_tools are supported"
                raise PydanticCustomError("unsupported_parameter", message, {"kind": repr(kind[:40])})
        message = f'must be "none", "auto", "required", {self._named} or allowed_tools'
        raise PydanticCustomError("invalid_value", message)

    def _allowed(self, mode: ToolMode, tools: Sequence[object]) -> AllowedTools:
        names: set[str] = set()
        left_out: list[OfferedTool] = []
        for tool in tools:
            match tool:
                case {"type": str(kind)} if kind not in ("function", "custom", ""):
                    left_out.append(OfferedTool.model_construct(type=kind))
                case _:
                    names.add(self._name(tool))
        return AllowedTools(mode, frozenset(names), tuple(left_out))

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the field."""
        name = {"name": {"type": "string"}}
        tools = {kind: {kind: _object(**name)} if self.is_nested else name for kind in ("function", "custom")}
        tool = {"anyOf": [_object(type={"enum": [kind]}, **fields) for kind, fields in tools.items()]}
        allowed = {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": tool}}
        fields = {"allowed_tools": _object(**allowed)} if self.is_nested else allowed
        allowing = _object(type={"enum": ["allowed_tools"]}, **fields)
        return {"anyOf": [{"enum": list(get_args(ToolMode))}, tool, allowing, {"type": "null"}]}

    @property
    def _named(self) -> str:
        function = '"function": {"name": …}' if self.is_nested else '"name": …'
        return f'{{"type": "function", {function}}}'

    def _name(self, tool: object) -> str:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} if self.is_nested:
                return name
            case {"type": "custom", "custom": {"name": str(name)}} if self.is_nested:
                return name
            case {"type": "function" | "custom", "name": str(name)} if not self.is_nested:
                return name
        raise PydanticCustomError("invalid_value", f"must have {self._named} for each tool that it names")


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_CHAT_FORM = ToolChoiceForm(is_nested=True)
ToolChoiceField = Annotated[
    ToolChoice | AllowedTools | None, PlainValidator(_CHAT_FORM.parse), WithJsonSchema(_CHAT_FORM.schema)
]
"""`tool_choice` of chat completions."""


def allowed_tools(tools: Sequence[Tool], choice: AllowedTools) -> Sequence[Tool]:
    """Raises `InvalidRequest` for an allowed tool that is not in `tools`."""
    allowed = [tool for tool in tools if tool.function.name in choice.names]
    if missing := choice.names - {tool.function.name for tool in allowed}:
        message = f"tool_choice allows the tool {min(missing)!r}, which is not in tools."
        raise InvalidRequest(message, param="tool_choice")
    return allowed


def check_tools(tools: Sequence[Tool], tool_choice: ToolChoice, left_out: Sequence[OfferedTool] = ()) -> None:
    """Raises `InvalidRequest`. `left_out`: the tools of other types."""
    names = [tool.function.name for tool in tools]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidRequest(f"The tools must have different names; {twice[0]!r} is there twice.", param="tools")
    if left_out and isinstance(tool_choice, NamedTool) and tool_choice.name not in names:
        for tool in left_out:
            if tool.name == tool_choice.name:
                message = f"tool_choice names the tool {tool.name!r}, whose type {tool.type!r} is not supported."
                raise UnsupportedField(message, param="tool_choice")
    if left_out and not tools and tool_choice == "required":
        kinds = ", ".join(repr(kind) for kind in dict.fromkeys(tool.type[:40] for tool in left_out[:10]))
        message = f"tool_choice demands a call, but there are only tools of types that are not supported: {kinds}."
        raise UnsupportedField(message, param="tool_choice")
    if not tools and tool_choice not in ("none", "auto"):
        raise InvalidRequest("tool_choice is only allowed when tools are specified.", param="tool_choice")
    if isinstance(tool_choice, NamedTool) and tool_choice.name not in names:
        message = f"tool_choice names the tool {tool_choice.name!r}, which is not in tools."
        raise InvalidRequest(message, param="tool_choice")
