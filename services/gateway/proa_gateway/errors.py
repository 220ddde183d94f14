"""The gateway's errors: their HTTP statuses and OpenAI's error object.

GatewayError
├── InvalidRequest       400  a parameter is invalid; `param` names it
│   ├── MissingField     400  the parameter is required
│   ├── UnsupportedField 400  the field would change the answer, but is not implemented
│   ├── UnsupportedTask  400  the model does not support the endpoint's task
│   ├── GrammarFailed    400  the output cannot be continued under the request's grammar
│   ├── PreviousResponseNotFound 400  the response to continue is not stored in this gateway process
│   └── ContextOverflow  400  prompt and output do not fit the model's context length
├── InvalidJson          400  the body is not JSON
├── MalformedHttp        400  the bytes of the connection are not HTTP
├── InvalidApiKey        401  the API key is missing or unknown
├── NotAnOperator        403  the API key lacks the role that the endpoint needs
├── HostNotAllowed       403  a gateway without API keys does not answer under this name
├── HeaderMissing        403  a header is missing by which a request is known not to come from any web page
├── ModelNotFound        404  no engine serves the model
├── ResponseNotFound     404  the response is not stored in this gateway process
├── RequestTimeout       408  the request did not arrive in time
├── BodyTooLarge         413  the request body is over the limit
├── UnsupportedMediaType 415  the Content-Type is not JSON, or the body is compressed
├── HeadersTooLarge      431  the headers are over the limits
├── Overloaded           429  a limit of the gateway or of an engine is reached
├── RateLimited          429  a limit of the API key is reached
├── EngineUnavailable    503  no engine can take the request now
├── LoraNotLoaded        503  an engine did not load the adapter, or has unloaded it
│   ├── LoraNotFound     404  there is no adapter of that name, or none at its path
│   └── LoraInvalid      400  the adapter does not fit the model, or another one has its name
├── QueueTimeout         503  the request waited in the gateway's queue for too long
├── ShuttingDown         503  the gateway shut down while the request was in its queue
├── EngineLost           503  the connection to the engine was lost while it ran the request
├── EngineTimeout        504  no token came in time, though the engine is connected
├── DeadlineExceeded     504  the request's time limit has passed
├── GenerationFailed     500  the engine's result cannot be used; others are not affected
└── InternalError        500  a fault of the gateway

Rejections of engines become the errors above by their gRPC status: INVALID_ARGUMENT InvalidRequest, NOT_FOUND
LoraNotLoaded, RESOURCE_EXHAUSTED Overloaded, others EngineUnavailable (`engines/session.py`). The end of a session
becomes EngineLost. Failed operations on adapters: NOT_FOUND LoraNotFound, INVALID_ARGUMENT and ALREADY_EXISTS
LoraInvalid, others LoraNotLoaded (`engines/convert.py`). `proa_engine/server/errors.py` lists the engine's side.
"""

from typing import Any, ClassVar


class GatewayError(Exception):
    """An error that is sent as OpenAI's error object: message, type, param and code. Clients see `message`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    retry_after: int | None = None  # seconds

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's error object, for a response body or an event of a stream."""
        return error_object(self.message, self.type, self.param, self.code)


class InvalidRequest(GatewayError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class MissingField(InvalidRequest):
    code = "missing_required_parameter"


class UnsupportedField(InvalidRequest):
    code = "unsupported_parameter"


class UnsupportedTask(InvalidRequest):
    code = "unsupported_task"


class ContextOverflow(InvalidRequest):
    code = "context_length_exceeded"


class GrammarFailed(InvalidRequest):
    code = "grammar_failed"


class PreviousResponseNotFound(InvalidRequest):
    """OpenAI's status and code, by which clients know that they have to send the whole conversation again."""

    code = "previous_response_not_found"


class InvalidJson(GatewayError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_json"


class MalformedHttp(GatewayError):
    status = 400
    type = "invalid_request_error"
    code = "malformed_http"


class InvalidApiKey(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class NotAnOperator(GatewayError):
    status = 403
    type = "invalid_request_error"
    code = "insufficient_permissions"


class HostNotAllowed(GatewayError):
    status = 403
    type = "invalid_request_error"
    code = "host_not_allowed"


class HeaderMissing(GatewayError):
    status = 403
    type = "invalid_request_error"
    code = "header_missing"


class ModelNotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class ResponseNotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "response_not_found"


class RequestTimeout(GatewayError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"

    @property
    def headers(self) -> dict[str, str]:
        return {"connection": "close"}


class BodyTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaType(GatewayError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class HeadersTooLarge(GatewayError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class Overloaded(GatewayError):
    """`limit`: the gateway limit that was reached, by its name in metrics; None: an engine's limit."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after = 1

    def __init__(self, message: str, *, limit: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit


class RateLimited(GatewayError):
    """`kind`: the limit that was reached, `requests` or `tokens`."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after = retry_after

    def to_dict(self) -> dict[str, Any]:
        return error_object(self.message, self.kind, self.param, self.code)


class EngineUnavailable(GatewayError):
    status = 503
    code = "engine_unavailable"
    retry_after = 1


class LoraNotLoaded(GatewayError):
    status = 503
    code = "adapter_not_loaded"
    retry_after: int | None = 1


class LoraNotFound(LoraNotLoaded):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    retry_after = None


class LoraInvalid(LoraNotLoaded):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"
    retry_after = None


class QueueTimeout(GatewayError):
    status = 503
    code = "queue_timeout"
    retry_after = 5


class ShuttingDown(GatewayError):
    status = 503
    code = "shutting_down"
    retry_after = 1


class EngineLost(GatewayError):
    status = 503
    code = "engine_lost"
    retry_after = 1


class EngineTimeout(GatewayError):
    status = 504
    code = "engine_timeout"


class DeadlineExceeded(GatewayError):
    status = 504
    code = "deadline_exceeded"


class GenerationFailed(GatewayError):
    code = "generation_failed"


class InternalError(GatewayError):
    code = "internal_error"


def error_object(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Make OpenAI's error object. Lone surrogates, as in field names, are replaced: UTF-8 cannot encode them."""
    message, param = _printable(message), _printable(param) if param is not None else None
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def _printable(text: str) -> str:
    return text.encode(errors="replace").decode()
