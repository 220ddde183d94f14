"""Deltas to OpenAI's JSON: events of a stream, or one response.

The bytes that all events of a choice share are rendered once. The common event, with one token's text and nothing else,
is these bytes around one JSON string.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from proa.contract import TokenLogprobs
from proa.text import Vocabulary
from proa_gateway.deltas import Delta
from proa_gateway.openai.envelope import Envelope, Prompt, Usage
from proa_gateway.openai.logprobs import ChatLogprobs, CompletionLogprobs, TokenName, join, prompt_logprobs


class Choice(Protocol):
    """Renders one choice. Stateful: `opening` comes first, and deltas come in order."""

    text_head: bytes
    """The event of a delta that has only text is `text_head`, the text as a JSON string, `text_tail`."""
    text_tail: bytes
    begins_with_prompt: bool
    """The first event has more than its delta, so it must come from `event`."""

    def opening(self, usage: Usage | None = None) -> bytes:
        """The events before the first delta, or nothing."""
        ...

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes: ...

    def final(self, delta: Delta) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        ...


class ChatChoice:
    """A choice of `/v1/chat/completions`."""

    begins_with_prompt = False

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        *,
        role: str = "assistant",
        echo: str = "",
        logprobs: ChatLogprobs | None = None,
        token_ids: bool = False,
        opening_fields: Mapping[str, object] | None = None,
    ) -> None:
        """`echo`: text before that of the output. `logprobs` None: no log probabilities. `token_ids`: whether the
        choice has them. `opening_fields`: of the first event of a stream."""
        self._envelope = envelope
        self._index = index
        self._role = role
        self._echo = echo
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._opening_fields = opening_fields or {}
        self.text_head = envelope.event_head + b'{"index":%d,"delta":{"content":' % index
        self.text_tail = b'},"logprobs":null,"finish_reason":null}' + envelope.event_tail

    def opening(self, usage: Usage | None = None) -> bytes:
        choice = {"index": self._index, "delta": None, "logprobs": None, "finish_reason": None}
        role = orjson.dumps(choice | {"delta": {"role": self._role, "content": ""}})
        opening = self._envelope.event(role, usage, **self._opening_fields)
        if self._echo:
            opening += self._envelope.event(orjson.dumps(choice | {"delta": {"content": self._echo}}), usage)
        return opening

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes:
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return self._envelope.event(orjson.dumps(self._choice(delta, "delta", content)), usage)

    def final(self, delta: Delta) -> dict[str, Any]:
        message = {"role": self._role, "content": self._echo + delta.text}
        absent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        return {"token_ids": None, **self._choice(delta, "message", message | absent)}

    def _choice(self, delta: Delta, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._logprobs(delta.logprobs)
        choice = {"index": self._index, name: message, "logprobs": logprobs, **_finish_fields(delta)}
        return choice | {"token_ids": delta.token_ids} if self._token_ids else choice


class CompletionChoice:
    """A choice of `/v1/completions`. With `echo`, its text begins with the prompt."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        prompt: Prompt,
        vocabulary: Vocabulary,
        *,
        echo: bool = False,
        logprobs: TokenName | None = None,
        prompt_logprobs: bool = False,
        token_ids: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`logprobs`: the tokens' names in them, None: no log probabilities. `prompt_logprobs` and `token_ids`: whether
        the choice has these fields."""
        self._envelope = envelope
        self._index = index
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._logprobs = None
        if logprobs is not None:
            self._logprobs = CompletionLogprobs(vocabulary, logprobs, skip_special_tokens=skip_special_tokens)
        self._prompt_logprobs = prompt_logprobs
        self._token_ids = token_ids
        self._sends_prompt_ids = token_ids  # in the first event
        self.begins_with_prompt = echo  # until the prompt is rendered
        self.text_head = envelope.event_head + b'{"index":%d,"text":' % index
        self.text_tail = b',"logprobs":null,"finish_reason":null}' + envelope.event_tail

    def opening(self, usage: Usage | None = None) -> bytes:
        return b""

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes:
        choice = self._choice(delta)
        if self._sends_prompt_ids:
            self._sends_prompt_ids = False
            choice["prompt_token_ids"] = list(self._prompt.token_ids)
        return self._envelope.event(orjson.dumps(choice), usage)

    def final(self, delta: Delta) -> dict[str, Any]:
        fields = prompt_fields(
            self._prompt,
            delta.prompt_logprobs,
            self._vocabulary,
            logprobs=self._prompt_logprobs,
            token_ids=self._token_ids,
        )
        return {"token_ids": None, **self._choice(delta), **fields}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        echo, self.begins_with_prompt = self.begins_with_prompt, False
        text = (self._prompt.text or "") + delta.text if echo else delta.text
        logprobs = self._render_logprobs(delta, echo=echo)
        choice = {"index": self._index, "text": text, "logprobs": logprobs, **_finish_fields(delta)}
        return choice | {"token_ids": delta.token_ids} if self._token_ids else choice

    def _render_logprobs(self, delta: Delta, *, echo: bool) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        if not echo:
            return self._logprobs.render(delta.logprobs)
        prompt = self._logprobs.render_prompt(self._prompt.token_ids, delta.prompt_logprobs)
        return join(prompt, self._logprobs.render(delta.logprobs))


def prompt_fields(
    prompt: Prompt, entries: Sequence[TokenLogprobs], vocabulary: Vocabulary, *, logprobs: bool, token_ids: bool
) -> dict[str, Any]:
    """vLLM's response fields about the prompt; null if not requested."""
    return {
        "prompt_logprobs": prompt_logprobs(entries, vocabulary) if logprobs else None,
        "prompt_token_ids": list(prompt.token_ids) if token_ids else None,
    }


def _finish_fields(delta: Delta) -> dict[str, Any]:
    if delta.finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
