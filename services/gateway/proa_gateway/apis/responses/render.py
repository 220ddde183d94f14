"""How the response of `/v1/responses` looks."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from proa.contract import SamplingParams, TokenLogprobs
from proa_gateway.apis.responses.items import Fields
from proa_gateway.apis.responses.output import Event, OutputItems
from proa_gateway.apis.responses.protocol import ResponsesRequest
from proa_gateway.errors import GatewayError
from proa_gateway.output.deltas import Delta
from proa_gateway.parsing.events import MessageEvent
from proa_gateway.serving.answer import CollectedChoice, EventOutlet, StreamedChoice
from proa_gateway.serving.envelope import Prompt, Usage
from proa_gateway.serving.message_format import MessageFormat
from proa_gateway.serving.message_sinks import MessageOutput, MessageStream


def new_response(
    body: ResponsesRequest, *, id: str, created: int, model: str, params: SamplingParams | None = None
) -> Fields:
    """A response without output. `params` None: the model and its defaults are not known yet."""
    text_format = body.text.format if body.text else None
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress" if params is not None else "queued",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": body.reasoning.summary if body.reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.keeps_response,
        "temperature": params.temperature if params is not None else body.temperature,
        "text": {
            "format": text_format.model_dump(by_alias=True, exclude_unset=True) if text_format else {"type": "text"}
        },
        "tool_choice": body.tool_choice.sent,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p if params is not None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def ended(response: Fields, output: Sequence[Fields], usage: Usage, *, complete: bool) -> Fields:
    return {
        **response,
        "completed_at": int(time.time()) if complete else None,
        "status": "completed" if complete else "incomplete",
        "incomplete_details": None if complete else {"reason": "max_output_tokens"},
        "output": list(output),
        "usage": _usage(usage),
    }


def failed(response: Fields, error: GatewayError, output: Sequence[Fields] = ()) -> Fields:
    """The code is one of those that the API has; the message is the error's."""
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
    details = {"code": code, "message": error.message, "param": error.param, "type": error.type}
    return {**response, "status": "failed", "error": details, "output": list(output)}


def cancelled(response: Fields) -> Fields:
    return {**response, "status": "cancelled"}


def _usage(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponsesChoice:
    """The `EventRenderer` of `/v1/responses`. `finish_reason`: of the output, once it has ended."""

    def __init__(self, response: Fields, items: OutputItems) -> None:
        """`response`: without output, in progress."""
        self.response = response
        self.items = items
        self.finish_reason: str | None = None
        self._num_events = 0

    def opening(self, usage: Usage) -> bytes:
        return self.render(
            ("response.created", {"response": self.response}), ("response.in_progress", {"response": self.response})
        )

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        return self.render(*self.add(events, delta))

    def add(self, events: Sequence[MessageEvent], delta: Delta) -> list[Event]:
        self.finish_reason = delta.finish_reason
        return self.items.add(events, delta)

    def render(self, *events: Event) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in events)

    def _event(self, kind: str, fields: Fields) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


Keep = Callable[[Fields], None]
"""Stores a response."""


class ResponsesAnswer:
    """The `Answer` of a response: it has one choice."""

    def __init__(
        self, choice: ResponsesChoice, message_format: MessageFormat | None, keep: Keep, *, wants_tokens: bool
    ) -> None:
        """`message_format`: None: all text is content. `keep` gets the response when it has ended."""
        self._choice = choice
        self._message_format = message_format
        self._keep = keep
        self.wants_tokens = wants_tokens

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        return MessageStream(self._choice, self._message_format, outlet)

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice:
        return _Collector(self._choice, self._message_format)

    def last_events(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        return self._choice.render((f"response.{response['status']}", {"response": response}))

    def error_events(self, error: GatewayError) -> bytes:
        choice = self._choice
        last = choice.items.close("incomplete")
        response = failed(choice.response, error, choice.items.items)
        self._keep(response)
        return choice.render(*last, ("response.failed", {"response": response}))

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        return orjson.dumps(self._ended(usage))

    def _ended(self, usage: Usage) -> Fields:
        choice = self._choice
        response = ended(choice.response, choice.items.items, usage, complete=choice.finish_reason != "length")
        self._keep(response)
        return response


class _Collector(MessageOutput):
    """The `CollectedChoice` of a response. The same items as in a stream are built; their events are dropped."""

    def __init__(self, choice: ResponsesChoice, message_format: MessageFormat | None) -> None:
        super().__init__(self, message_format)
        self._choice = choice
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()

    def events(self, events: Sequence[MessageEvent], delta: Delta) -> None:
        self._choice.add(events, delta)

    def final(self) -> dict[str, Any]:
        return self._choice.response
