"""The routes of Anthropic's Messages API."""

from typing import Any

from fastapi import APIRouter, Request, Response

from proa_gateway.apis.messages.job import count_tokens, messages_call
from proa_gateway.apis.messages.protocol import (
    MESSAGE_RESPONSE,
    REFUSED,
    AnthropicErrorBody,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from proa_gateway.gateway import ERRORS, admitted, gateway_of, respond
from proa_gateway.http.bodies import JsonRoute

messages_router = APIRouter(route_class=JsonRoute)
_ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": AnthropicErrorBody} for status in ERRORS}


@messages_router.post("/v1/messages", responses={**_ERRORS, 200: MESSAGE_RESPONSE})
async def create_message(body: MessagesRequest, request: Request) -> Response:
    return respond(messages_call(body, gateway_of(request).settings, request.state.request_id), request)


@messages_router.post("/v1/messages/count_tokens", response_model=TokenCount, responses=_ERRORS)
async def count_message_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
    """The tokens of the prompt that a message with the same fields would have."""
    gateway = gateway_of(request)
    request.state.response_headers += gateway.notices.check_extra(body.extra_fields, REFUSED)
    request.state.response_headers += gateway.notices.warnings(body.warnings)
    with admitted(request, body.model) as model:
        return {"input_tokens": await count_tokens(body, gateway.settings, model)}
