"""Renders the responses of `/v1/messages`: a message's events as Anthropic's content blocks, and errors."""

from collections.abc import Sequence
from typing import Any

import orjson

from proa_gateway.errors import GatewayError
from proa_gateway.http.errors import ErrorForm
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
)
from proa_gateway.serving.choices import Output, Prompt, Usage

Fields = dict[str, Any]
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesChoice:
    """The message. Anthropic's client, given all bytes of `event`, assembles the message that `final` returns."""

    text_frame = None

    def __init__(self, head: Fields, *, includes_reasoning: bool, ends_at_context: bool) -> None:
        """`head`: the message's fields that are known before its content. `ends_at_context`: the model's context ends
        an output before `max_tokens`."""
        self._head = head
        self._includes_reasoning = includes_reasoning
        self._reason_of_length = "model_context_window_exceeded" if ends_at_context else "max_tokens"
        self._index = -1  # of the block that was opened last
        self._open = ""  # the type of the block that is open; empty: none is
        self._has_calls = False  # a call has started
        self.stop: Fields = {"stop_reason": None, "stop_sequence": None}  # null until the last event

    def opening(self, usage: Usage) -> bytes:
        message = {**self._head, "content": [], **self.stop, "usage": usage_of(usage)}
        return event_of("message_start", message=message) + event_of("ping")

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        data = b"".join(self._event(event) for event in events)
        if delta.finish_reason is None:
            return data
        self.stop = self._stop(delta)
        return data + self._close()

    def final(self, events: Sequence[MessageEvent], delta: Delta) -> Fields:
        content: list[Fields] = []
        arguments: dict[int, str] = {}
        for event in events:
            match event:
                case ContentDelta(text):
                    content.append(_block("text", text=text))
                case ReasoningDelta(text) if self._includes_reasoning:
                    content.append(_block("thinking", thinking=text))
                case CallStarted(index, id, name):
                    self._has_calls = True
                    content.append(_block("tool_use", id=id, name=name))
                    arguments[index] = ""
                case ArgumentsDelta(index, text):
                    arguments[index] += text
        calls = (block for block in content if block["type"] == "tool_use")
        for block, text in zip(calls, arguments.values(), strict=True):
            block["input"] = _parsed(text)
        return {**self._head, "content": content, **self._stop(delta)}

    def _event(self, event: MessageEvent) -> bytes:
        match event:
            case ContentDelta(text):
                return self._in("text") + self._delta("text_delta", text=text)
            case ReasoningDelta(text) if self._includes_reasoning:
                return self._in("thinking") + self._delta("thinking_delta", thinking=text)
            case CallStarted(_, id, name):
                self._has_calls = True
                return self._close() + self._start("tool_use", id=id, name=name)
            case ArgumentsDelta(_, text):
                return self._delta("input_json_delta", partial_json=text)
            case CallEnded():
                return self._close()
        return b""

    def _in(self, kind: str) -> bytes:
        """Return the events that open a content block of type `kind`, empty if one is open already."""
        return b"" if self._open == kind else self._close() + self._start(kind)

    def _start(self, kind: str, **fields: object) -> bytes:
        self._index += 1
        self._open = kind
        return event_of("content_block_start", index=self._index, content_block=_block(kind, **fields))

    def _delta(self, kind: str, **fields: object) -> bytes:
        return event_of("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signature = self._delta("signature_delta", signature="") if self._open == "thinking" else b""
        self._open = ""
        return signature + event_of("content_block_stop", index=self._index)

    def _stop(self, delta: Delta) -> Fields:
        if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        reason = "end_turn"
        if delta.finish_reason == "length":
            reason = self._reason_of_length
        elif self._has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}


def usage_of(usage: Usage) -> Fields:
    """Return Anthropic's usage, which counts input tokens that were read from the cache separately."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def event_of(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: " % kind.encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def _block(kind: str, **fields: object) -> Fields:
    """Make a content block of type `kind`. Fields that are not given are empty."""
    empty: dict[str, Fields] = {
        "text": {"text": ""},
        "thinking": {"thinking": "", "signature": ""},
        "tool_use": {"input": {}},
    }
    return {"type": kind, **empty[kind], **fields}


def _parsed(arguments: str) -> Any:
    """Parse the arguments of a call. If they were cut off and are not JSON, return them as they are."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


class MessagesRenderer:
    """The `Renderer` of a message: it has one choice."""

    follows_output = False
    wants_tokens = False

    def __init__(
        self, model: str, request_id: str, id: str, created: int, *, includes_reasoning: bool, ends_at_context: bool
    ) -> None:
        """`request_id`: for errors. `ends_at_context`: as for `MessagesChoice`."""
        head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._choice = MessagesChoice(head, includes_reasoning=includes_reasoning, ends_at_context=ends_at_context)
        self._request_id = request_id

    def choice(self, index: int, prompt: Prompt) -> MessagesChoice:
        return self._choice

    def last_events(self, usage: Usage) -> bytes:
        return event_of("message_delta", delta=self._choice.stop, usage=usage_of(usage)) + event_of("message_stop")

    def error_events(self, error: GatewayError) -> bytes:
        return (
            b"event: error\ndata: " + orjson.dumps(error_body(error.status, error.message, self._request_id)) + b"\n\n"
        )

    def body(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        return orjson.dumps({**self._choice.final(outputs[0].events, outputs[0].delta), "usage": usage_of(usage)})


def error_body(status: int, message: str, request_id: str) -> Fields:
    """Return Anthropic's error object."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


MESSAGES_ERRORS = ErrorForm("/v1/messages", error_body, b"request-id")
