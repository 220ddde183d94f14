"""The engine server's own conversions: a gateway's session messages, defaults that the server fills in, errors.

The only file of the engine that names protobuf messages, beside the servicer's signatures and empty responses.
"""

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from proa.contract import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Hello,
    KvEvents,
    LoadedLoras,
    Lora,
    ModelInfo,
    Rejected,
    SchedulerStats,
    SessionClaim,
)
from proa.contract.pb import from_pb, to_pb, write_pb
from proa.engine.v1 import core_pb2, service_pb2
from proa.options import flat, masked
from proa_engine.config import EngineConfig
from proa_engine.core.operations import LoadLora, Sleep, UnloadLora
from proa_engine.observability.telemetry import TRACE_HEADERS
from proa_engine.server.errors import EngineError, InvalidRequest, status_number
from proa_engine.server.kv_events import TierChanges

SessionRequest = service_pb2.SessionRequest
SessionResponse = service_pb2.SessionResponse
SERVICE = service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
MAX_NAME_BYTES = 256  # of a request id, and of a tenant
FILE_PART_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Open:
    """A gateway's first message in a session."""

    client_id: str


@dataclass(frozen=True, slots=True)
class Add:
    """A gateway adds a request. One that is not valid is the error to reject it with."""

    handle: int
    request: EngineCoreRequest | InvalidRequest


@dataclass(frozen=True, slots=True)
class AbortHandles:
    """A gateway aborts some of its requests."""

    handles: tuple[int, ...]


def tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The deserializer, but it returns None for bytes that are not a message."""

    def deserialize_or_none(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return None

    return deserialize_or_none


def session_message_from_pb(
    message: service_pb2.SessionRequest | None, *, now: float, vocab_size: int
) -> Open | Add | AbortHandles | SessionClaim:
    """Raises `InvalidRequest` for a message that ends the session: malformed, empty, or with a handle of zero."""
    if message is None:
        raise InvalidRequest("the bytes are not a session message")
    match message.WhichOneof("message"):
        case "open":
            return Open(message.open.client_id)
        case "add":
            if message.add.handle == 0:
                raise InvalidRequest("handle must be above zero")
            try:
                return Add(message.add.handle, request_from_pb(message.add.request, now=now, vocab_size=vocab_size))
            except InvalidRequest as error:
                return Add(message.add.handle, error)
        case "abort":
            return AbortHandles(tuple(message.abort.handles))
        case "claim":
            return SessionClaim(message.claim.num_blocks, message.claim.longest_wait)
        case _:
            raise InvalidRequest("a session message must be one of open, add, abort, claim")


def request_from_pb(
    message: core_pb2.EngineCoreRequest,
    *,
    now: float,
    vocab_size: int,
    metadata: Iterable[tuple[str, str | bytes]] = (),
) -> EngineCoreRequest:
    """The request, with what its sender left unset: an id and a sampling key at random, `now` as arrival time, and the
    trace headers among the call's `metadata`. Raises `InvalidRequest`; of the model's limits, which `check_request`
    checks, only for lists that have more token ids than its vocabulary: to read those would take this thread's time.
    """
    _check_lengths(message.sampling_params, vocab_size)
    _check_lengths(message.pooling_params, vocab_size)
    for field in ("request_id", "tenant"):
        if len(getattr(message, field).encode()) > MAX_NAME_BYTES:
            raise InvalidRequest(f"{field} must not be longer than {MAX_NAME_BYTES} bytes")
    if not 0 <= message.arrival_time < float("inf"):
        raise InvalidRequest("arrival_time must be a finite number of seconds since 1970")
    try:
        request = from_pb(EngineCoreRequest, message)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    if request.pooling_params is None and request.sampling_params.key is None:
        request.sampling_params.key = secrets.randbits(64)
    return replace(
        request,
        request_id=request.request_id or secrets.token_hex(16),
        trace_headers=request.trace_headers or {key: str(value) for key, value in metadata if key in TRACE_HEADERS},
        arrival_time=request.arrival_time or now,
    )


def _check_lengths(params: Message, vocab_size: int) -> None:
    for field, value in params.ListFields():
        if not field.is_repeated:
            if field.message_type is not None:
                _check_lengths(value, vocab_size)
            continue
        length = len(value)
        if field.name == "bad_words_token_ids" and length <= vocab_size:
            length = sum(len(word.token_ids) for word in value)
        if length > vocab_size:
            raise InvalidRequest(f"{field.name} must have at most {vocab_size} token ids, the vocabulary, got {length}")


def generate_to_pb(output: EngineCoreOutput) -> service_pb2.GenerateResponse:
    return service_pb2.GenerateResponse(output=to_pb(core_pb2.EngineCoreOutput, output))


def hello_to_pb(hello: Hello) -> service_pb2.SessionResponse:
    return service_pb2.SessionResponse(hello=to_pb(service_pb2.Hello, hello))


def outputs_to_pb(outputs: EngineCoreOutputs) -> service_pb2.SessionResponse:
    message = service_pb2.SessionResponse()
    write_pb(outputs, message.outputs)
    return message


def rejected_to_pb(handle: int, error: EngineError) -> service_pb2.SessionResponse:
    rejected = Rejected(
        handle=handle,
        code=status_number(error),
        message=str(error),
        retryable=error.retryable,
        missing_images=error.missing_images,
        missing_audios=error.missing_audios,
    )
    return service_pb2.SessionResponse(rejected=to_pb(service_pb2.Rejected, rejected))


def draining_to_pb() -> service_pb2.SessionResponse:
    return service_pb2.SessionResponse(draining=service_pb2.Draining())


def loras_to_pb(loaded: LoadedLoras) -> service_pb2.SessionResponse:
    return service_pb2.SessionResponse(loras=to_pb(service_pb2.LoadedLoras, loaded))


def model_info_to_pb(info: ModelInfo) -> service_pb2.GetModelInfoResponse:
    return to_pb(service_pb2.GetModelInfoResponse, info)


def tokenizer_files_to_pb(files: Iterable[tuple[str, bytes]]) -> Iterator[service_pb2.GetTokenizerResponse]:
    for name, data in files:
        for start in range(0, max(len(data), 1), FILE_PART_BYTES):
            yield service_pb2.GetTokenizerResponse(file_name=name, data=data[start : start + FILE_PART_BYTES])


def load_to_pb(stats: SchedulerStats) -> service_pb2.GetLoadResponse:
    return service_pb2.GetLoadResponse(stats=to_pb(core_pb2.SchedulerStats, stats))


def kv_events_to_pb(sequence: int, device: TierChanges, host: TierChanges) -> service_pb2.SubscribeKvEventsResponse:
    events = KvEvents(
        sequence=sequence,
        snapshot=device.blocks.is_snapshot,
        stored=list(device.blocks.stored),
        removed=list(device.blocks.removed),
        checkpoints_stored=list(device.checkpoints.stored),
        checkpoints_removed=list(device.checkpoints.removed),
        host_snapshot=host.blocks.is_snapshot,
        host_stored=list(host.blocks.stored),
        host_removed=list(host.blocks.removed),
        host_checkpoints_stored=list(host.checkpoints.stored),
        host_checkpoints_removed=list(host.checkpoints.removed),
    )
    return to_pb(service_pb2.SubscribeKvEventsResponse, events)


def server_info_to_pb(config: EngineConfig) -> service_pb2.GetServerInfoResponse:
    options = msgspec.json.encode(masked(flat(config)))  # infinity is null
    return service_pb2.GetServerInfoResponse(config=options.decode())


def sleep_from_pb(message: service_pb2.SleepRequest) -> Sleep:
    """Raises `InvalidRequest`."""
    match message.level:
        case 0 | 1:
            return Sleep(1, message.wait, message.since)
        case 2:
            return Sleep(2, message.wait, message.since)
        case level:
            raise InvalidRequest(f"level must be 1 or 2, got {level}")


def load_lora_from_pb(message: service_pb2.LoadLoraRequest, model_names: Collection[str]) -> LoadLora:
    """Raises `InvalidRequest`."""
    if message.name in model_names:
        raise InvalidRequest(f"{message.name!r} is the name of the model")
    return LoadLora(message.name, message.path, message.replace)


def unload_lora_from_pb(message: service_pb2.UnloadLoraRequest) -> UnloadLora:
    """Raises `InvalidRequest`."""
    if not message.name:
        raise InvalidRequest("name must not be empty")
    return UnloadLora(message.name)


def load_lora_to_pb(lora: Lora) -> service_pb2.LoadLoraResponse:
    return service_pb2.LoadLoraResponse(lora=to_pb(service_pb2.Lora, lora))


def health_to_pb(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    status = health_pb2.HealthCheckResponse.ServingStatus
    return status.SERVING if serving else status.NOT_SERVING
