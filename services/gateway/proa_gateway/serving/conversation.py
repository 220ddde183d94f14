"""Conversation: what a model is to answer, made from the body of any API of chats."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

from proa.template_rules import REASONING_FIELDS
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.parsing.format import NamedTool, TextGrammar
from proa_gateway.serving.content import Content, read_answer
from proa_gateway.serving.custom_tools import ChatInputFormat, call_arguments, function_fields, grammar_of
from proa_gateway.serving.fields import Effort, TemplateValue, TemplateVariables, Text, Unsupported
from proa_gateway.serving.offers import Offered, OfferedTool, by_type

MAX_NAME = 128
MAX_TOOLS = 1024  # OpenAI has 128
MAX_CALLS = 1024  # of a message
ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}$")]
MAX_MESSAGES = 4096  # of a conversation


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
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

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

    _grammar: TextGrammar | None = PrivateAttr(default=None)

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

    mode: ToolMode
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


class FunctionCall(BaseModel):
    """`arguments`: JSON text, or the object itself."""

    name: Text
    arguments: Text | dict[Text, TemplateValue] | None = None


class ToolCall(BaseModel):
    """A call in the history, by the model."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TemplateValue]

    id: Text = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def _read_custom(cls, value: Any) -> Any:
        """Read the call of a custom tool as one of the function that it is for the model."""
        match value:
            case {"type": "custom", "custom": {"name": name, "input": str(text)}, **others}:
                return {**others, "type": "function", "function": {"name": name, "arguments": call_arguments(text)}}
            case {"type": "custom"}:
                raise PydanticCustomError("invalid_value", 'must have "custom": {"name": …, "input": …}')
        return value


class ChatMessage(BaseModel):
    """A message. Other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, TemplateValue]

    role: Annotated[Text, Field(min_length=1)]
    content: Content = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    function_call: Unsupported = None
    audio: Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _read_answer(cls, value: Any) -> Any:
        """Read the parts that only the assistant's content has. Reasoning that has a field of its own is kept."""
        match value:
            case {"role": "assistant", "content": [_, *_] as parts}:
                content, reasoning = read_answer(parts)
                fields = {**value, "content": content or None}
                if reasoning and not any(value.get(name) for name in REASONING_FIELDS):
                    fields["reasoning_content"] = reasoning
                return fields
        return value


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a model is to answer, and how."""

    messages: Sequence[ChatMessage]  # in the form of chat completions, tool calls and their results included
    tools: Sequence[Tool] = ()
    left_out_tools: Sequence[OfferedTool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    includes_reasoning: bool = True  # the answer shows it
    separates_reasoning: bool = True  # it is not part of the answer's text
    thinking_token_budget: int | None = None  # after so many tokens reasoning is closed; None: never
    reasoning_effort: Effort | None = None
    documents: Sequence[Mapping[str, object]] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)  # the chat template's variables
    chat_template: str | None = None  # None: the model's own
    opens_message: bool = True  # the prompt ends with the opening of a new message
    continues_message: bool = False  # the prompt ends within the last message

    @property
    def prompt_tools(self) -> Sequence[Tool]:
        """The tools that the model gets to know."""
        return () if self.tool_choice == "none" else self.tools


class TemplateFields(BaseModel):
    """The fields of a chat that its template reads, beside the messages."""

    add_generation_prompt: bool | None = Field(None, description="True unless the final message is continued.")
    continue_final_message: bool | None = None
    chat_template: Text | None = Field(None, description="Needs a gateway with --trust-request-chat-template.")
    chat_template_kwargs: TemplateVariables | None = None
    documents: Annotated[list[dict[Text, TemplateValue]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    reasoning_effort: Effort | None = None
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceField = None

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(tool.function.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def opens_message(self) -> bool:
        """Whether the prompt ends with the opening of a new message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def conversation(self, messages: Sequence[ChatMessage]) -> Conversation:
        """Raises `InvalidRequest`."""
        tools: Sequence[Tool] = [tool for tool in self.tools or () if isinstance(tool, Tool)]
        left_out = [tool for tool in self.tools or () if isinstance(tool, OfferedTool)]
        tool_choice = self.tool_choice or "auto"
        if isinstance(tool_choice, AllowedTools):
            tools, left_out = allowed_tools(tools, tool_choice), [*left_out, *tool_choice.left_out]
            tool_choice = tool_choice.mode
        return Conversation(
            messages=messages,
            tools=tools,
            left_out_tools=left_out,
            tool_choice=tool_choice,
            reasoning_effort=self.reasoning_effort,
            documents=self.documents or (),
            template_kwargs=self.chat_template_kwargs or {},
            chat_template=self.chat_template,
            opens_message=self.opens_message,
            continues_message=bool(self.continue_final_message),
        )


@dataclass(frozen=True, slots=True)
class ReasoningFields:
    """Fields about reasoning that clients of an API send to any model."""

    effort_field: str = "reasoning_effort"  # path of the effort
    thinking: bool | None = (
        None  # the value for the template's switch, unless `template_kwargs` has one; None: not sent
    )
    thinking_field: str = ""  # its path, maybe that of the effort
