"""The response object, which events and stored responses have too."""

import time
from collections.abc import Sequence

from proa.contract import SamplingParams
from proa_gateway.errors import GatewayError
from proa_gateway.openai.envelope import Usage
from proa_gateway.responses.parts import Fields
from proa_gateway.responses.protocol import ResponsesRequest


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
