"""The server's errors and their gRPC status codes.

EngineError
├── InvalidRequest      the request is wrong; every engine would refuse it
├── RequestIdInUse      an unfinished request has this id
├── QueueFull           the waiting queue is full; another engine may take the request
├── SlowReader          a session has too many unread bytes
├── NoPrefixCache       KV events requested, but prefix caching is off
├── NotReady            the model is still loading
├── LoraNotLoaded       the request's adapter is not loaded; another engine may have it
├── ImagesMissing       the request has images without pixels that the engine has not kept
├── Sleeping            the engine sleeps until an operator wakes it up; another engine may take the request
├── Draining            the engine is shutting down and admits no new requests
└── EngineDead          the engine has failed

`LoraError` of the core, of an operation on adapters, has status codes too.
"""

from collections.abc import Sequence

import grpc

from proa_engine.core.lora_store import LoraError, LoraExists, LoraInvalid, LoraNotFound, TooManyLoras
from proa_engine.core.types import Rejection


class EngineError(Exception):
    """An error for the caller; the message is a sentence. `retryable`: another engine may take the request."""

    retryable = False
    missing_images: Sequence[bytes] = ()  # hashes of images that the engine accepts with their pixels


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


class LoraNotLoaded(EngineError):
    retryable = True


class ImagesMissing(EngineError):
    retryable = True


class Sleeping(EngineError):
    retryable = True


class Draining(EngineError):
    retryable = True


class EngineDead(EngineError):
    retryable = True


STATUS_CODES: dict[type[EngineError] | type[LoraError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    RequestIdInUse: grpc.StatusCode.ALREADY_EXISTS,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    SlowReader: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoPrefixCache: grpc.StatusCode.FAILED_PRECONDITION,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    LoraNotLoaded: grpc.StatusCode.NOT_FOUND,
    ImagesMissing: grpc.StatusCode.FAILED_PRECONDITION,
    Sleeping: grpc.StatusCode.UNAVAILABLE,
    Draining: grpc.StatusCode.UNAVAILABLE,
    EngineDead: grpc.StatusCode.UNAVAILABLE,
    LoraNotFound: grpc.StatusCode.NOT_FOUND,
    LoraInvalid: grpc.StatusCode.INVALID_ARGUMENT,
    LoraExists: grpc.StatusCode.ALREADY_EXISTS,
    TooManyLoras: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

# By `Rejection.code` of the core.
REJECTIONS: dict[str, type[EngineError]] = {
    "resource_exhausted": QueueFull,
    "invalid_argument": InvalidRequest,
    "already_exists": RequestIdInUse,
    "not_found": LoraNotLoaded,
    "unavailable": Sleeping,
    "failed_precondition": ImagesMissing,
}


def rejection_error(rejection: Rejection) -> EngineError:
    error = REJECTIONS[rejection.code](rejection.message)
    error.missing_images = rejection.missing_images
    return error


def status_code(error: EngineError | LoraError) -> grpc.StatusCode:
    return STATUS_CODES[type(error)]


def status_number(error: EngineError) -> int:
    """The numeric code, for `Rejected.code`."""
    number: int = status_code(error).value[0]
    return number
