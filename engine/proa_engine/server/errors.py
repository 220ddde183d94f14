"""The engine's errors, their gRPC status codes, and the gateway's errors that a rejected request becomes.

EngineError           gRPC status          gateway, HTTP status
├── InvalidRequest    INVALID_ARGUMENT     InvalidRequest 400     no engine with this model would accept the request
├── RequestIdInUse    ALREADY_EXISTS       EngineUnavailable 503  an unfinished request has this id
├── QueueFull         RESOURCE_EXHAUSTED   Overloaded 429         the waiting queue is full
├── LoraNotLoaded     NOT_FOUND            LoraNotLoaded 503      the request's adapter is not loaded in this engine
├── MediaMissing      FAILED_PRECONDITION  (sent again)           pixels or samples are neither sent nor kept
├── Sleeping          UNAVAILABLE          EngineUnavailable 503  the engine sleeps until an operator wakes it up
├── NotReady          UNAVAILABLE          EngineUnavailable 503  the model is still loading
├── Draining          UNAVAILABLE          EngineUnavailable 503  the engine shuts down and admits no new requests
├── EngineDead        UNAVAILABLE          EngineLost 503         the engine has failed; its sessions end
├── SlowReader        RESOURCE_EXHAUSTED   EngineLost 503         too many unread bytes; the session ends
└── NoPrefixCache     FAILED_PRECONDITION  (no request)           KV events are requested, prefix caching is off

LoraError             (of the core: an operation on adapters failed)
├── LoraNotFound      NOT_FOUND            LoraNotFound 404       there is no adapter of that name, or none at that path
├── LoraInvalid       INVALID_ARGUMENT     LoraInvalid 400        the adapter does not fit the model
├── LoraExists        ALREADY_EXISTS       LoraInvalid 400        another adapter has the name
└── TooManyLoras      RESOURCE_EXHAUSTED   LoraNotLoaded 503      all loaded adapters have requests

If the error is `retryable`, the gateway tries other engines first, and the client gets the error when those fail too.
"""

from collections.abc import Sequence

import grpc

from proa_engine.core.lora_store import LoraError, LoraExists, LoraInvalid, LoraNotFound, TooManyLoras
from proa_engine.core.types import Rejection


class EngineError(Exception):
    """An error for the caller; the message is a sentence. `retryable`: another engine may take the request."""

    retryable = False
    missing_images: Sequence[bytes] = ()  # hashes of images that the engine accepts with their pixels
    missing_audios: Sequence[bytes] = ()  # hashes of audios that it accepts with their samples


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


class MediaMissing(EngineError):
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
    MediaMissing: grpc.StatusCode.FAILED_PRECONDITION,
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
    "failed_precondition": MediaMissing,
}


def rejection_error(rejection: Rejection) -> EngineError:
    error = REJECTIONS[rejection.code](rejection.message)
    error.missing_images, error.missing_audios = rejection.missing_images, rejection.missing_audios
    return error


def status_code(error: EngineError | LoraError) -> grpc.StatusCode:
    return STATUS_CODES[type(error)]


def status_number(error: EngineError) -> int:
    """The numeric code, for `Rejected.code`."""
    number: int = status_code(error).value[0]
    return number
