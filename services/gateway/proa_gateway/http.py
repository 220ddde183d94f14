"""What HTTP needs around the routes: answers that end with their client, a limit on bodies, errors as OpenAI's.

Plain ASGI where every event of a stream would pass through; FastAPI's handlers elsewhere. Knows nothing of engines.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.errors import BodyTooLarge, GatewayError, InternalError, UnsupportedMediaType, error_object

_log = logging.getLogger(__name__)
_SERVER_SEND = "proa.server_send"
Handler = Callable[..., Awaitable[Response]]
_CODES = {"missing": "missing_required_parameter", "json_invalid": "invalid_json"}


class ClientBoundResponse(Response):
    """Runs `work`, which answers through ASGI's `send`, and cancels it when the client goes away.

    `work` is given two of them: the usual one, with which an answer must begin, and the server's own, for events of
    an answer that has begun. Every layer of the application wraps `send` once more to see whether an answer has
    begun, which is half a microsecond an event.
    """

    def __init__(self, work: Callable[[Send, Send], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.create_task(self._work(send, scope[_SERVER_SEND]))
        watching = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)


class KeepServerSend:
    """Outermost: keeps the server's own `send` where `ClientBoundResponse` finds it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SERVER_SEND] = send
        await self._app(scope, receive, send)


class BodyLimit:
    """Middleware that refuses bodies over a number of bytes, by their header or as they come."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await gateway_error_response(self._too_large())(scope, receive, send)
            return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body must not be larger than {self._max_bytes} bytes.")


def gateway_error_response(error: GatewayError) -> JSONResponse:
    return JSONResponse(error.to_dict(), error.status, error.headers)


def error_handlers(
    observe: Callable[[Request, int, str], None],
) -> dict[type[Exception], Handler]:
    """Every error of the application as OpenAI's error object. `observe` is told each one's status and type."""

    async def on_gateway_error(request: Request, error: GatewayError) -> Response:
        observe(request, error.status, error.code or type(error).__name__)
        return gateway_error_response(error)

    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes):  # FastAPI has not read it as JSON
            sent = request.headers.get("content-type", "")[:80]
            message = f"The body must be JSON, sent with the header Content-Type: application/json, not {sent!r}."
            return await on_gateway_error(request, UnsupportedMediaType(message))
        body = validation_error_object(error.errors())
        observe(request, 400, body["error"]["code"])
        return JSONResponse(body, 400)

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, GatewayError):  # raised while FastAPI was reading the body
            return await on_gateway_error(request, error.__cause__)
        observe(request, error.status_code, str(error.status_code))
        body = error_object(f"{request.method} {request.url.path}: {error.detail}", "invalid_request_error")
        return JSONResponse(body, error.status_code, error.headers)

    async def on_fault(request: Request, error: Exception) -> Response:
        return await on_gateway_error(request, InternalError("The gateway failed."))

    return {
        GatewayError: on_gateway_error,
        RequestValidationError: on_validation_error,
        HTTPException: on_http_error,
        Exception: on_fault,
    }


def validation_error_object(errors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Says the first thing that is wrong."""
    error = errors[0]
    if error["type"] == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return error_object(f"The body is not valid JSON: {reason}", "invalid_request_error", None, "invalid_json")
    param = _param(error["loc"][1:])
    code = _CODES.get(error["type"], error["type"] if error["type"].startswith("unsupported") else "invalid_value")
    message = f"{param}: {error['msg']}" if param else f"The body: {error['msg']}"
    return error_object(message, "invalid_request_error", param or None, code)


def _param(location: Sequence[str | int]) -> str:
    """`messages[0].content`, as OpenAI names it."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
