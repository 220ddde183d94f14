"""Responses of the generation endpoints, for the OpenAPI document. `rendering.py` writes them without these classes."""

from typing import Any, Literal

from pydantic import BaseModel

TokenLogprobs = dict[str, dict[str, Any]]  # token id -> logprob, rank, decoded_token


class PromptTokensDetails(BaseModel):
    """The fields about images are those of prompts that have some."""

    cached_tokens: int
    image_tokens: int | None = None
    multimodal_tokens: dict[str, int] | None = None


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class UsageInfo(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # of models whose reasoning is parsed


class _Response(BaseModel):
    id: str
    created: int
    model: str
    usage: UsageInfo
    service_tier: None
    system_fingerprint: None
    kv_transfer_params: None
    metrics: dict[str, float | None] | None


class _Chunk(BaseModel):
    id: str
    created: int
    model: str
    usage: UsageInfo | None = None
    metrics: dict[str, float | None] | None = None


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort", "repetition"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


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


class CompletionLogprobLists(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChunkChoice(_Choice):
    text: str
    logprobs: CompletionLogprobLists | None
    prompt_token_ids: list[int] | None = None


class CompletionChoice(CompletionChunkChoice):
    prompt_logprobs: list[TokenLogprobs | None] | None


class Completion(_Response):
    """A completion that is not streamed."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionChunk(_Chunk):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


def generation_response(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI response of an endpoint that answers in one body or in a stream of events."""
    events = f"Events with a `{chunk.__name__}` each, or an error; the last one is `[DONE]`."
    stream = {"schema": {"type": "string", "description": events}}
    return {"model": whole, "description": "The choices.", "content": {"text/event-stream": stream}}
