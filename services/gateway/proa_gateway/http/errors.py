"""HTTP errors: every error as OpenAI's error object, or in the form of the API whose path was requested.

Middleware, the exception handlers and the connection's protocol ask the same `ErrorForms`, so that errors about keys or
bodies look like those of the API's routes.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

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


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The errors of an API that has a form of its own."""

    path: str  # of the API's first endpoint; the others are below it
    body: Callable[[int, str, str], dict[str, Any]]  # made from the status, the message and the request's id
    id_header: bytes  # in which the API's clients read the request's id


class ErrorForms:
    """The forms of errors by path. OpenAI's where no other one is given."""

    def __init__(self, forms: Sequence[ErrorForm] = ()) -> None:
        self._forms = forms

    def at(self, path: str) -> ErrorForm | None:
        """The form of errors at this path; None: OpenAI's."""
        for form in self._forms:
            if path == form.path or path.startswith(f"{form.path}/"):
                return form
        return None

    def id_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The headers of a response that have the request's id, which is `request_id` in the scope's state."""
        request_id, form = scope["state"].get("request_id", "").encode(), self.at(route_path(scope))
        own = [(form.id_header, request_id)] if form is not None else []
        return [*own, (b"x-request-id", request_id)]

    def response(self, scope: Scope, error: GatewayError) -> JSONResponse:
        """Make the response to a request that failed. The scope's state has `request_id`."""
        return self.convert(scope, error.to_dict(), error.status, error.headers)

    def convert(
        self, scope: Scope, body: dict[str, Any], status: int, headers: Mapping[str, str] | None = None
    ) -> JSONResponse:
        """As `response`, for an error in OpenAI's form."""
        form = self.at(route_path(scope))
        if form is not None:
            body = form.body(status, body["error"]["message"], scope["state"]["request_id"])
        return JSONResponse(body, status, headers)


def error_handlers(
    observe: Callable[[Request, int, str], None], forms: ErrorForms
) -> dict[type[Exception], ErrorHandler]:
    """Return the application's exception handlers. `observe` is called with each error's status and type."""

    async def on_gateway_error(request: Request, error: GatewayError) -> Response:
        observe(request, error.status, error.code or type(error).__name__)
        return forms.response(request.scope, error)

    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes):  # FastAPI did not parse it as JSON
            sent = request.headers.get("content-type", "")[:80]
            message = f"The body must be JSON, sent with the header Content-Type: application/json, not {sent!r}."
            return await on_gateway_error(request, UnsupportedMediaType(message))
        body = validation_error_object(error.errors(), error.body)
        observe(request, 400, body["error"]["code"])
        return forms.convert(request.scope, body, 400)

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, GatewayError):  # raised while FastAPI read the body
            return await on_gateway_error(request, error.__cause__)
        if (reason := _unreadable(error.__cause__)) is not None:
            return await on_gateway_error(request, InvalidJson(f"The body is not valid JSON: {reason}"))
        observe(request, error.status_code, str(error.status_code))
        body = error_object(f"{request.method} {request.url.path}: {error.detail}", "invalid_request_error")
        return forms.convert(request.scope, body, error.status_code, error.headers)

    async def on_fault(request: Request, error: Exception) -> Response:
        response = await on_gateway_error(request, InternalError("The gateway failed."))
        response.raw_headers += forms.id_headers(request.scope)  # no middleware runs any more
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
    only up to a value that pydantic converted. Branches of models that
    have errors of their own have names in `<>`: they are no fields that are missing."""
    for depth, part in enumerate(location, start=1):
        if isinstance(body, dict):
            if part in body or (depth == len(location) and not str(part).startswith("<")):
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
