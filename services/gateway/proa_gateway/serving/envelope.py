"""OpenAI's response around its choices: the envelope with the usage, and its classes for the OpenAPI document."""

from collections.abc import Sequence
from typing import Any, Literal

import orjson
from pydantic import BaseModel

from proa.contract import TokenLogprobs
from proa.text import Vocabulary
from proa_gateway.errors import GatewayError
from proa_gateway.serving.choices import Prompt, Usage
from proa_gateway.serving.logprobs import prompt_logprobs

_DONE = b"data: [DONE]\n\n"


class Envelope:
    """The fields around the choices, the same in all events of one HTTP response."""

    def __init__(self, *, id: str, object: str, created: int, model: str, include_usage: bool = False) -> None:
        self._fields = {"id": id, "object": object, "created": created, "model": model}
        self._include_usage = include_usage

    def event(self, choice: bytes, usage: Usage | None = None, **fields: object) -> bytes:
        """An event with one choice, given as JSON. `fields`: more of them around the choice."""
        return self.event_head(**fields) + choice + self.event_tail(usage)

    def event_head(self, **fields: object) -> bytes:
        """An event up to its choice."""
        return b"data: " + orjson.dumps({**self._fields, **fields})[:-1] + b',"choices":['

    def event_tail(self, usage: Usage | None = None) -> bytes:
        """An event after its choice."""
        if usage is not None:
            return b'],"usage":' + orjson.dumps(usage.to_dict()) + b"}\n\n"
        return b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"

    def last_events(self, usage: Usage) -> bytes:
        metrics = {"metrics": usage.metrics} if usage.metrics is not None else {}
        return (self.event(b"", usage, **metrics) if self._include_usage else b"") + _DONE

    def error_events(self, error: GatewayError) -> bytes:
        return b"data: " + orjson.dumps(error.to_dict()) + b"\n\n" + _DONE

    def response(self, choices: Sequence[dict[str, Any]], usage: Usage, **fields: object) -> bytes:
        """Fields that are not there are null, as in vLLM: OpenAI's client raises where one is missing."""
        absent = {"service_tier": None, "system_fingerprint": None, "kv_transfer_params": None}
        others = {**absent, "metrics": usage.metrics, **fields}
        return orjson.dumps({**self._fields, "choices": choices, "usage": usage.to_dict(), **others})


def prompt_fields(
    prompt: Prompt, entries: Sequence[TokenLogprobs], vocabulary: Vocabulary, *, logprobs: bool, token_ids: bool
) -> dict[str, Any]:
    """vLLM's response fields about the prompt; null if not requested."""
    return {
        "prompt_logprobs": prompt_logprobs(entries, vocabulary) if logprobs else None,
        "prompt_token_ids": list(prompt.token_ids) if token_ids else None,
    }


# Of responses, for the OpenAPI document. They are written without these classes.

PromptLogprobs = dict[str, dict[str, Any]]  # token id -> logprob, rank, decoded_token


class PromptTokensDetails(BaseModel):
    """The fields about images and audio are those of prompts that have some."""

    cached_tokens: int
    image_tokens: int | None = None
    audio_tokens: int | None = None
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
    created: int  # Unix seconds
    model: str
    usage: UsageInfo
    service_tier: None  # OpenAI's client raises where it is missing, like the next two
    system_fingerprint: None
    kv_transfer_params: None
    metrics: dict[str, float | None] | None  # times, if `--enable-per-request-metrics` is set


class Chunk(BaseModel):
    id: str
    created: int  # Unix seconds
    model: str
    usage: UsageInfo | None = None  # in the last event; in all with `continuous_usage_stats`
    metrics: dict[str, float | None] | None = None  # as in `Response`, in the last event


class ResponseChoice(BaseModel):
    index: int  # counted over all prompts
    finish_reason: Literal["stop", "length", "tool_calls", "abort", "repetition"] | None
    stop_reason: int | str | None = None  # id of the stop token, or the stop string, that ended the output
    token_ids: list[int] | None = None  # if `return_token_ids` is true


def generation_response(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI response of an endpoint that answers in one body or in a stream of events."""
    events = f"Events with a `{chunk.__name__}` each, or an error; the last one is `[DONE]`."
    stream = {"schema": {"type": "string", "description": events}}
    return {"model": whole, "description": "The choices.", "content": {"text/event-stream": stream}}
