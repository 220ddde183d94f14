"""What can go wrong, as the client is told it. Knows OpenAI's error object and HTTP statuses, not how they are sent.

GatewayError
├── InvalidRequest       400  the client's mistake; says which parameter and why
│   └── ContextOverflow  400  the prompt, or prompt and output, do not fit the model's context
├── InvalidApiKey        401  a key is asked for, and there was none or a wrong one
├── ModelNotFound        404  no engine serves this model
├── BodyTooLarge         413  the request body is over the limit
├── UnsupportedMediaType 415  the body is not said to be JSON
├── Overloaded           429  too much is waiting already; try again after `retry_after` seconds
├── RateLimited          429  the API key has used up what it may
├── EngineUnavailable    503  no engine can take the request now
├── QueueTimeout         503  waited for its turn for as long as may be
├── ShuttingDown         503  waited for its turn when the gateway was told to end
├── EngineLost           503  the engine went away with the request
├── EngineTimeout        504  the engine lives but this request's next token did not come in time
├── DeadlineExceeded     504  the request took longer than it was allowed, or than its client wanted to wait
└── InternalError        500  our own fault
"""

from typing import Any, ClassVar


class GatewayError(Exception):
    """An error with OpenAI's four fields. `message` is for the client to read."""

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
        """OpenAI's error object, as it stands in a response body or in an event of a stream."""
        return error_object(self.message, self.type, self.param, self.code)


class InvalidRequest(GatewayError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextOverflow(InvalidRequest):
    code = "context_length_exceeded"


class InvalidApiKey(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class ModelNotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class BodyTooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaType(GatewayError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Overloaded(GatewayError):
    """`limit`: the gateway's that was met, as metrics call it; None: an engine's."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"
    retry_after = 1

    def __init__(self, message: str, *, limit: str | None = None) -> None:
        super().__init__(message)
        self.limit = limit


class RateLimited(GatewayError):
    """`kind`: of what it was too much, `requests` or `tokens`."""

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


class InternalError(GatewayError):
    code = "internal_error"


def error_object(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
