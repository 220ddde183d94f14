"""The bodies of `/v1/chat/completions` and of its batches."""

from typing import Annotated

from pydantic import Field

from proa_gateway.serving.conversation import MAX_MESSAGES, Messages
from proa_gateway.serving.fields import TemplateValue, TemplateVariables, Text
from proa_gateway.serving.generation_request import (
    MAX_THINKING_TOKENS,
    Count,
    Effort,
    GenerationRequest,
    Name,
    NumLogprobs,
)
from proa_gateway.serving.tools import MAX_TOOLS, Tool, ToolChoiceField


class ChatFields(GenerationRequest):
    """The fields of a chat completion, but for the messages."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = Field(None, description="True unless the final message is continued.")
    continue_final_message: bool | None = None
    echo: bool | None = Field(None, description="The text begins with the last message if that has the same role.")
    chat_template: Text | None = Field(None, description="Needs a gateway with --trust-request-chat-template.")
    documents: Annotated[list[dict[Text, TemplateValue]], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    reasoning_effort: Effort | None = None
    return_prompt_text: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    prompt_cache_key: Name | None = Field(None, description="Like `session_id`, which comes first.")
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call. Default: true.")
    include_reasoning: bool | None = Field(None, description="False: the answer does not show it. Default: true.")
    separate_reasoning: bool | None = Field(None, description="False: it is part of the content. Default: true.")
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_THINKING_TOKENS)] | None = Field(
        None, description="At most so many tokens of reasoning, which is closed then. -1: any number."
    )

    @property
    def opens_message(self) -> bool:
        """Whether the prompt ends with the opening of a new message."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class ChatCompletionRequest(ChatFields):
    """`POST /v1/chat/completions`."""

    messages: Messages


MAX_CHATS = 1024  # a gateway has a lower limit of choices in one request


class BatchChatCompletionRequest(ChatFields):
    """`POST /v1/chat/completions/batch`. The fields are those of a chat completion, for each of the conversations."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_CHATS, fail_fast=True)]

    @property
    def chats(self) -> list[ChatCompletionRequest]:
        """A request for each conversation. Fields that the class does not have are not in them."""
        fields = {name: getattr(self, name) for name in self.model_fields_set if name in ChatFields.model_fields}
        return [ChatCompletionRequest.model_construct(**fields, messages=messages) for messages in self.messages]
