"""Parts of OpenAI's responses, for the OpenAPI document. Responses are written without these classes."""

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


class Response(BaseModel):
    id: str
    created: int
    model: str
    usage: UsageInfo
    service_tier: None
    system_fingerprint: None
    kv_transfer_params: None
    metrics: dict[str, float | None] | None


class Chunk(BaseModel):
    id: str
    created: int
    model: str
    usage: UsageInfo | None = None
    metrics: dict[str, float | None] | None = None


class Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort", "repetition"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


def generation_response(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI response of an endpoint that answers in one body or in a stream of events."""
    events = f"Events with a `{chunk.__name__}` each, or an error; the last one is `[DONE]`."
    stream = {"schema": {"type": "string", "description": events}}
    return {"model": whole, "description": "The choices.", "content": {"text/event-stream": stream}}
