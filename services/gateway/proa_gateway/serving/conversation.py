"""Conversation: what a model is to answer, made from the body of any API of chats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from proa_gateway.serving.content import Content
from proa_gateway.serving.fields import TemplateValue, Text, Unsupported
from proa_gateway.serving.generation_request import Effort
from proa_gateway.serving.tools import MAX_CALLS, Tool, ToolChoice

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


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """`messages`: in the form of chat completions, tool calls and their results included.

    `template_kwargs`: the chat template's variables. `chat_template`: None: the model's own. `opens_message`: the
    prompt ends with the opening of a new message. `continues_message`: it ends within the last one.
    `includes_reasoning`: the answer shows it. `separates_reasoning`: it is not part of the answer's text.
    `thinking_token_budget`: after so many tokens it is closed.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    includes_reasoning: bool = True
    separates_reasoning: bool = True
    thinking_token_budget: int | None = None
    reasoning_effort: Effort | None = None
    documents: Sequence[Mapping[str, object]] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    chat_template: str | None = None
    opens_message: bool = True
    continues_message: bool = False

    @property
    def prompt_tools(self) -> Sequence[Tool]:
        """The tools that the model gets to know."""
        return () if self.tool_choice == "none" else self.tools


@dataclass(frozen=True, slots=True)
class ReasoningFields:
    """Fields about reasoning that clients of an API send to any model. `thinking`: the value for the template's switch,
    unless `template_kwargs` has one; None: not sent. `thinking_field` and `effort_field`: their paths, maybe one
    path."""

    thinking: bool | None
    thinking_field: str
    effort_field: str
