"""What is around the choices of a response: its envelope, the usage; and the prompt that they answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proa.contract import Image, TokenLogprobs
from proa.text import Vocabulary
from proa_gateway.errors import GatewayError
from proa_gateway.serving.logprobs import prompt_logprobs
from proa_gateway.serving.message_format import MessageFormat

_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """`reasoning_tokens`: those of the completion's tokens; None: reasoning is not distinguished from the rest.
    `image_tokens`: those of the prompt's. `metrics`: times of the request that the response is to have beside them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    image_tokens: int = 0
    metrics: dict[str, float | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.image_tokens:  # OpenAI's name, and vLLM's
            usage["prompt_tokens_details"] |= {
                "image_tokens": self.image_tokens,
                "multimodal_tokens": {"image": self.image_tokens},
            }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt. `text` None: the response does not need it. `images`: with their pixels. `message_format`:
    how the outputs are parsed; None: they are not, all text is content."""

    token_ids: Sequence[int]
    text: str | None = None
    images: tuple[Image, ...] = ()
    message_format: MessageFormat | None = None


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
