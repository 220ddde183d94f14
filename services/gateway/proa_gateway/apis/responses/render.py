"""Renders the responses of `/v1/responses`."""

import time
from collections.abc import Callable, Sequence

import orjson

from proa.contract import SamplingParams
from proa_gateway.apis.responses.items import Fields
from proa_gateway.apis.responses.output import Event, OutputItems
from proa_gateway.apis.responses.protocol import ResponsesRequest
from proa_gateway.errors import GatewayError
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import MessageEvent
from proa_gateway.serving.choices import Output, Prompt, Usage


def new_response(
    body: ResponsesRequest, *, id: str, created: int, model: str, params: SamplingParams | None = None
) -> Fields:
    """Make a response without output. `params` None: the model and its defaults are not known yet."""
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
    """Return the failed response. Its code is one that OpenAI's API defines; the message is the error's."""
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


Keep = Callable[[Fields], None]
"""Stores a response."""


class ResponsesRenderer:
    """The `Renderer` of a response and of its only choice. Events are numbered. The output's items are built from the
    same events whether they are streamed or not."""

    follows_output = True
    text_frame = None

    def __init__(
        self, response: Fields, items: OutputItems, keep: Keep, *, is_streamed: bool, wants_tokens: bool
    ) -> None:
        """`response`: in progress, without output. `keep` is called with the response when it has ended."""
        self._response = response
        self._items = items
        self._keep = keep
        self._finish_reason: str | None = None  # None until the output ends
        self._num_events = 0  # numbers the events
        self._is_streamed = is_streamed
        self.wants_tokens = wants_tokens

    def choice(self, index: int, prompt: Prompt) -> "ResponsesRenderer":
        return self

    def opening(self, usage: Usage) -> bytes:
        return self._render(
            ("response.created", {"response": self._response}), ("response.in_progress", {"response": self._response})
        )

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        self._finish_reason = delta.finish_reason
        added = self._items.add(events, delta)
        return self._render(*added) if self._is_streamed else b""

    def last_events(self, usage: Usage) -> bytes:
        response = self._ended(usage)
        return self._render((f"response.{response['status']}", {"response": response}))

    def error_events(self, error: GatewayError) -> bytes:
        last = self._items.close("incomplete")
        response = failed(self._response, error, self._items.items)
        self._keep(response)
        return self._render(*last, ("response.failed", {"response": response}))

    def body(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        return orjson.dumps(self._ended(usage))

    def _ended(self, usage: Usage) -> Fields:
        is_complete = self._finish_reason != "length"
        response = ended(self._response, self._items.items, usage, complete=is_complete)
        self._keep(response)
        return response

    def _render(self, *events: Event) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in events)

    def _event(self, kind: str, fields: Fields) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
