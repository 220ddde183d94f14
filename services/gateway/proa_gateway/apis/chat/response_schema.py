"""Responses of chat completions, for the OpenAPI document. `render.py` writes them without these classes."""

from typing import Literal

from pydantic import BaseModel

from proa_gateway.serving.openai_schema import TokenLogprobs, _Choice, _Chunk, _Response


class ChatToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprobs]


class CalledFunction(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionPart(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallPart(BaseModel):
    """The first part of a call has `id`, `type` and the name, those after it more of the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionPart


class ChatMessage(BaseModel):
    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatDelta(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatCompletionChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletionChunkChoice(_Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletion(_Response):
    """A chat completion that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatCompletionChoice]
    prompt_logprobs: list[TokenLogprobs | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None


class ChatCompletionChunk(_Chunk):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatCompletionChunkChoice]
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
