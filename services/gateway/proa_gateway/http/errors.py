"""HTTP errors: every error as OpenAI's error object, and as Anthropic's for its API.

All parts of the gateway make OpenAI's error object. A middleware converts it for the routes of the Messages API, so
that errors of other middleware, about keys or bodies, get the same form.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.errors import GatewayError, InternalError, InvalidJson, UnsupportedMediaType, error_object

_Model = TypeVar("_Model", bound=BaseModel)
ErrorHandler = Callable[..., Awaitable[Response]]


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of an error response, and of an error event in a stream."""

    error: ErrorDetail


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's responses with these statuses, for the OpenAPI document."""
    return {status: {"model": ErrorBody} for status in statuses}


def validated(model: type[_Model], body: dict[str, Any]) -> _Model:
    """Validate `body` against `model`, for routes that choose the model from the body's fields. Raises
    `RequestValidationError`."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in errors], body=body) from None


def route_path(scope: Scope) -> str:
    """Return the request's path without the root path under which the API is served."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def gateway_error_response(error: GatewayError) -> JSONResponse:
    return JSONResponse(error.to_dict(), error.status, error.headers)


def error_handlers(observe: Callable[[Request, int, str], None]) -> dict[type[Exception], ErrorHandler]:
    """Return the application's exception handlers. `observe` is called with each error's status and type."""

    async def on_gateway_error(request: Request, error: GatewayError) -> Response:
        observe(request, error.status, error.code or type(error).__name__)
        return gateway_error_response(error)

    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes):  # FastAPI did not parse it as JSON
            sent = request.headers.get("content-type", "")[:80]
            message = f"The body must be JSON, sent with the header Content-Type: application/json, not {sent!r}."
            return await on_gateway_error(request, UnsupportedMediaType(message))
        body = validation_error_object(error.errors(), error.body)
        observe(request, 400, body["error"]["code"])
        return JSONResponse(body, 400)

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, GatewayError):  # raised while FastAPI read the body
            return await on_gateway_error(request, error.__cause__)
        if (reason := _unreadable(error.__cause__)) is not None:
            return await on_gateway_error(request, InvalidJson(f"The body is not valid JSON: {reason}"))
        observe(request, error.status_code, str(error.status_code))
        body = error_object(f"{request.method} {request.url.path}: {error.detail}", "invalid_request_error")
        return JSONResponse(body, error.status_code, error.headers)

    async def on_fault(request: Request, error: Exception) -> Response:
        response = await on_gateway_error(request, InternalError("The gateway failed."))
        response.headers["x-request-id"] = getattr(request.state, "request_id", "")  # no middleware runs any more
        return response

    return {
        GatewayError: on_gateway_error,
        RequestValidationError: on_validation_error,
        HTTPException: on_http_error,
        Exception: on_fault,
    }


def _unreadable(cause: BaseException | None) -> str | None:
    """Return why `json.loads` failed, for errors that FastAPI does not explain; None for other errors."""
    match cause:
        case UnicodeDecodeError():
            return f"it is not {cause.encoding.upper()} at byte {cause.start}"
        case RecursionError():
            return "it is nested too deeply"
        case ValueError():
            return "it has an integer with too many digits"  # `sys.get_int_max_str_digits`
    return None


def validation_error_object(errors: Sequence[Mapping[str, Any]], body: object) -> dict[str, Any]:
    """Return the error object of the first of pydantic's `errors`. `body`: what was validated."""
    error = errors[0]
    kind = error["type"]
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "")
        return error_object(f"The body is not valid JSON: {reason}", "invalid_request_error", None, "invalid_json")
    source, *location = error["loc"]
    param = _param(_without_tags(location, body) if source == "body" else location)
    code = kind if kind.startswith("unsupported") else "invalid_value"
    if kind == "missing":
        code = "missing_required_parameter"
    message = f"{param}: {error['msg']}" if param else f"The body: {error['msg']}"
    return error_object(message, "invalid_request_error", param or None, code)


def _without_tags(location: Sequence[str | int], body: object) -> Iterator[str | int]:
    """Yield the part of pydantic's location that is a path in the body: without the names of a union's branches, and
    only up to a value that pydantic converted."""
    for depth, part in enumerate(location, start=1):
        if isinstance(body, dict):
            if part in body or depth == len(location):
                yield part
                body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int):
            yield part
            body = body[part]


def _param(location: Iterable[str | int]) -> str:
    """Return the field's path as OpenAI writes it: `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


MESSAGES_PATH = "/v1/messages"
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


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """Anthropic's error object."""

    type: str
    error: AnthropicErrorDetail
    request_id: str


def is_of_messages(path: str) -> bool:
    """Whether the path belongs to the Messages API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def anthropic_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_event(error: GatewayError, request_id: str) -> bytes:
    """Return the last event of a stream that failed."""
    return b"event: error\ndata: " + orjson.dumps(anthropic_error(error.status, error.message, request_id)) + b"\n\n"


class MessagesMiddleware:
    """Converts errors of the Messages API to its error object, and adds the request's id in the header that its clients
    read.

    The request's state has `request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if not is_of_messages(path):
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
    return orjson.dumps(anthropic_error(status, error["message"], request_id))
