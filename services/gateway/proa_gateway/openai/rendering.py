"""From deltas to OpenAI's JSON, as events of a stream or as one response.

What is the same in every event of a choice is made once: the common event, one token's text and nothing else, is
those bytes around one JSON string. Knows nothing of sockets or engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from proa.text import Vocabulary
from proa_gateway.openai.logprobs import CompletionLogprobs, chat_logprobs, join, prompt_logprobs
from proa_gateway.output_processor import Delta

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a sequence goes on from. `text` is None where nobody will ask for it."""

    token_ids: Sequence[int]
    text: str | None = None


class Envelope:
    """What every event or response of one HTTP request has around its choices."""

    def __init__(self, *, id: str, object: str, created: int, model: str, include_usage: bool = False) -> None:
        self._head = {"id": id, "object": object, "created": created, "model": model}
        self._include_usage = include_usage

    def around(self, choice: bytes, *, usage: Usage | None = None) -> bytes:
        """An event with one choice, given as JSON."""
        return self.event_head + choice + self._event_tail(usage)

    @property
    def event_head(self) -> bytes:
        return b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['

    @property
    def event_tail(self) -> bytes:
        return self._event_tail(None)

    def usage_event(self, usage: Usage) -> bytes:
        return self.event_head + self._event_tail(usage)

    def response(self, choices: Sequence[dict[str, Any]], usage: Usage, **extras: object) -> bytes:
        return orjson.dumps({**self._head, "choices": choices, "usage": usage.to_dict(), **extras})

    def _event_tail(self, usage: Usage | None) -> bytes:
        if usage is not None:
            return b'],"usage":' + orjson.dumps(usage.to_dict()) + b"}\n\n"
        return b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"


class Choice(Protocol):
    """One choice's JSON. Stateful: deltas must come in order, and `opening` first."""

    text_head: bytes
    """An event is text_head, the text as a JSON string, text_tail, where there is nothing but text."""
    text_tail: bytes
    goes_first: bool
    """Whether something must be said before the first text, so that it cannot be such an event."""

    def opening(self) -> bytes:
        """The event before the first delta's; empty where there is none."""
        ...

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes: ...

    def final(self, delta: Delta) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        ...


class ChatChoice:
    """`/v1/chat/completions`."""

    goes_first = False

    def __init__(
        self, envelope: Envelope, index: int, vocabulary: Vocabulary, *, logprobs: bool, token_ids: bool
    ) -> None:
        self._envelope = envelope
        self._index = index
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._token_ids = token_ids
        self.text_head = envelope.event_head + b'{"index":%d,"delta":{"content":' % index
        self.text_tail = b'},"logprobs":null,"finish_reason":null}' + envelope.event_tail

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._envelope.around(orjson.dumps(choice))

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return self._envelope.around(orjson.dumps(self._choice(delta, "delta", content)), usage=usage)

    def final(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta, "message", {"role": "assistant", "content": delta.text, "refusal": None})

    def _choice(self, delta: Delta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = chat_logprobs(delta.logprobs, self._vocabulary) if self._logprobs else None
        choice = {"index": self._index, name: message, "logprobs": logprobs, **_ending(delta)}
        return choice | {"token_ids": delta.token_ids} if self._token_ids else choice


class CompletionChoice:
    """`/v1/completions`. With `echo` the prompt is the beginning of the text."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        vocabulary: Vocabulary,
        *,
        logprobs: bool,
        token_ids: bool,
        skip_special_tokens: bool,
        echo: Prompt | None,
    ) -> None:
        self._envelope = envelope
        self._index = index
        self._logprobs = None
        if logprobs:
            self._logprobs = CompletionLogprobs(vocabulary, skip_special_tokens=skip_special_tokens)
        self._token_ids = token_ids
        self._echo = echo
        self.goes_first = echo is not None
        self.text_head = envelope.event_head + b'{"index":%d,"text":' % index
        self.text_tail = b',"logprobs":null,"finish_reason":null}' + envelope.event_tail

    def opening(self) -> bytes:
        return b""

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes:
        return self._envelope.around(orjson.dumps(self.final(delta)), usage=usage)

    def final(self, delta: Delta) -> dict[str, Any]:
        echo, self._echo = self._echo, None
        text = (echo.text or "") + delta.text if echo else delta.text
        choice = {"index": self._index, "text": text, "logprobs": self._lists(delta, echo), **_ending(delta)}
        return choice | {"token_ids": delta.token_ids} if self._token_ids else choice

    def _lists(self, delta: Delta, echo: Prompt | None) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        if echo is None:
            return self._logprobs.of(delta.logprobs)
        echoed = self._logprobs.echoed(echo.token_ids, delta.prompt_logprobs)
        return join(echoed, self._logprobs.of(delta.logprobs))


def prompt_extras(
    prompt: Prompt, result: Delta, vocabulary: Vocabulary, *, logprobs: bool, token_ids: bool
) -> dict[str, Any]:
    """vLLM's fields on the prompt, where they are asked for."""
    extras: dict[str, Any] = {}
    if logprobs:
        extras["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs, vocabulary)
    if token_ids:
        extras["prompt_token_ids"] = list(prompt.token_ids)
    return extras


def error_event(error: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(error) + b"\n\n"


def _ending(delta: Delta) -> dict[str, Any]:
    if delta.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
