"""The bodies of `/v1/chat/completions` and of its batches."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.beam_search import BeamSearchFields, check_beam_search
from proa_gateway.serving.conversation import Messages, TemplateFields
from proa_gateway.serving.envelope import Chunk, PromptLogprobs, Response, ResponseChoice
from proa_gateway.serving.fields import Count, Name, NumLogprobs
from proa_gateway.serving.generation_request import GenerationRequest

MAX_THINKING_TOKENS = 1_000_000
MAX_CHATS = 1024  # a gateway has a lower limit of choices in one request


class ChatFields(TemplateFields, BeamSearchFields, GenerationRequest):
    """The fields of a chat completion, but for the messages."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    echo: bool | None = Field(None, description="The text begins with the last message if that has the same role.")
    return_prompt_text: bool | None = None
    prompt_cache_key: Name | None = Field(None, description="Like `session_id`, which comes first.")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call. Default: true.")
    include_reasoning: bool | None = Field(None, description="False: the answer does not show it. Default: true.")
    separate_reasoning: bool | None = Field(None, description="False: it is part of the content. Default: true.")
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_THINKING_TOKENS)] | None = Field(
        None, description="At most so many tokens of reasoning, which is closed then. -1: any number."
    )

    def check(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.use_beam_search:
            check_beam_search(self)


class ChatCompletionRequest(ChatFields):
    """`POST /v1/chat/completions`."""

    messages: Messages


class BatchChatCompletionRequest(ChatFields):
    """`POST /v1/chat/completions/batch`. The fields are those of a chat completion, for each of the conversations."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_CHATS, fail_fast=True)]

    @property
    def chats(self) -> list[ChatCompletionRequest]:
        """A request for each conversation. Fields that the class does not have are not in them."""
        fields = {name: getattr(self, name) for name in self.model_fields_set if name in ChatFields.model_fields}
        return [ChatCompletionRequest.model_construct(**fields, messages=messages) for messages in self.messages]


# Responses, for the OpenAPI document. `render.py` writes them without these classes.


class ChatToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int]  # of the token in UTF-8; a character may be of several tokens


class ChatTokenLogprobs(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprobs]


class CalledFunction(BaseModel):
    name: str
    arguments: str  # JSON text; of a call that was cut off, its beginning


class CalledTool(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CustomInput(BaseModel):
    name: str
    input: str


class CalledCustomTool(BaseModel):
    id: str
    type: Literal["custom"]
    custom: CustomInput


class CalledFunctionPart(BaseModel):
    name: str | None = None
    arguments: str


class CustomInputPart(BaseModel):
    name: str | None = None
    input: str


class ToolCallPart(BaseModel):
    """The first part of a call has `id`, `type` and the name, those after it more of the arguments or of the input."""

    index: int  # of the call in the message
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunctionPart | None = None
    custom: CustomInputPart | None = None


class AssistantMessage(BaseModel):
    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool | CalledCustomTool] | None = None


class ChatDelta(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatCompletionChoice(ResponseChoice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletionChunkChoice(ResponseChoice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletion(Response):
    """A chat completion that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatCompletionChoice]
    prompt_logprobs: list[PromptLogprobs | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None


class ChatCompletionChunk(Chunk):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatCompletionChunkChoice]
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
