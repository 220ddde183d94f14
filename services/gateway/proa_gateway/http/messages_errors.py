"""Errors of the Messages API: Anthropic's error object, made from OpenAI's.

All parts of the gateway make OpenAI's error object. The middleware rewrites it for these routes, so that requests
without a valid key, with a body that is too large or is no JSON get the same form.
"""

from typing import Any

import orjson
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.errors import GatewayError, InternalError
from proa_gateway.http.errors import gateway_error_response, route_path

PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    type: str
    message: str


class ErrorBody(BaseModel):
    """Anthropic's error object."""

    type: str
    error: ErrorDetail
    request_id: str


def error_object(status: int, message: str, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_event(error: GatewayError, request_id: str) -> bytes:
    """The end of a stream that failed."""
    return b"event: error\ndata: " + orjson.dumps(error_object(error.status, error.message, request_id)) + b"\n\n"


class MessagesMiddleware:
    """Gives responses of the Messages API its error object, and the request's id in the header that its clients read.

    The request's state has `request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if path != PATH and not path.startswith(f"{PATH}/"):
            await self._app(scope, receive, send)
            return
        state, start = scope["state"], None

        async def send_rewritten(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"request-id", state["request_id"].encode())]
                if message["status"] >= 400:
                    start = message  # until its body, whose length changes
                    return
            elif start is not None:
                body = _rewritten(message["body"], start["status"], state["request_id"])
                headers = [header for header in start["headers"] if header[0].lower() != b"content-length"]
                start["headers"] = [*headers, (b"content-length", b"%d" % len(body))]
                await send(start)
                message, start = {**message, "body": body}, None
            await send(message)

        is_started = False

        async def observed(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send_rewritten(message)

        try:
            await self._app(scope, receive, observed)
        except Exception:
            # The error's handler runs further out, and answers only if nothing was sent yet.
            if not is_started:
                response = gateway_error_response(InternalError("The gateway failed."))
                await response(scope, receive, send_rewritten)
            raise


def _rewritten(body: bytes, status: int, request_id: str) -> bytes:
    error = orjson.loads(body)["error"]
    return orjson.dumps(error_object(status, error["message"], request_id))
