"""Conversation: what a model is to answer, made from the body of any API of chats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from proa.template_rules import REASONING_FIELDS
from proa_gateway.serving.content import Content, read_answer
from proa_gateway.serving.fields import Effort, TemplateValue, TemplateVariables, Text, Unsupported
from proa_gateway.serving.tools.offers import OfferedTool
from proa_gateway.serving.tools.tool import (
    MAX_TOOLS,
    AllowedTools,
    CustomTool,
    Tool,
    ToolChoice,
    ToolChoiceField,
    ToolField,
    allowed_tools,
    call_arguments,
)

MAX_CALLS = 1024  # of a message
MAX_MESSAGES = 4096  # of a conversation


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
    name: Text | None = None  # of the participant, or of the function that was called
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Text | None = None  # of the call whose result this is
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
    tools: Sequence[Tool] = ()  # of the supported types
    left_out_tools: Sequence[OfferedTool] = ()  # of other types
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True  # the answer may have several calls
    includes_reasoning: bool = True  # the answer shows it
    separates_reasoning: bool = True  # it is not part of the answer's text
    thinking_token_budget: int | None = None  # after so many tokens reasoning is closed; None: never
    reasoning_effort: Effort | None = None  # None: the chat template's default
    documents: Sequence[Mapping[str, object]] = ()  # for the chat template, as sent
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
