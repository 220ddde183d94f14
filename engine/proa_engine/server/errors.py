"""The server's typed errors and the one table that turns them into gRPC status codes.

EngineError
├── InvalidRequest      the caller's mistake; another engine would say the same
├── RequestIdInUse      an unfinished request has this id
├── QueueFull           the waiting queue is full; another engine may take it
├── SlowReader          a session's reader let too much pile up
├── NoPrefixCache       asked for events of a cache that is switched off
├── NotReady            the model is still loading
├── Draining            the engine is on its way out and admits nothing new
└── EngineDead          the engine cannot go on
"""

import grpc


class EngineError(Exception):
    """What a caller is told in a sentence. `retryable`: another engine may take the request."""

    retryable = False


class InvalidRequest(EngineError):
    pass


class RequestIdInUse(EngineError):
    pass


class QueueFull(EngineError):
    retryable = True


class SlowReader(EngineError):
    pass


class NoPrefixCache(EngineError):
    pass


class NotReady(EngineError):
    retryable = True


class Draining(EngineError):
    retryable = True


class EngineDead(EngineError):
    retryable = True


STATUS_CODES: dict[type[EngineError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    RequestIdInUse: grpc.StatusCode.ALREADY_EXISTS,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowReader: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoPrefixCache: grpc.StatusCode.FAILED_PRECONDITION,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    EngineDead: grpc.StatusCode.UNAVAILABLE,
}

# The core's rejections, by the code it gives them.
REJECTIONS: dict[str, type[EngineError]] = {
    "resource_exhausted": QueueFull,
    "invalid_argument": InvalidRequest,
    "already_exists": RequestIdInUse,
}


def status_code(error: EngineError) -> grpc.StatusCode:
    return STATUS_CODES[type(error)]


def status_number(error: EngineError) -> int:
    """The code as a number, as it travels in `Rejected`."""
    number: int = status_code(error).value[0]
    return number
