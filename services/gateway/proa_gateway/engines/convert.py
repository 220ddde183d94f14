"""The gateway's calls to an engine and the messages on them: the only file of the gateway that names protobuf."""

import json
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from proa.contract import (
    Draining,
    EngineCoreOutputs,
    EngineCoreRequest,
    Hello,
    KvEvents,
    LoadedLoras,
    Lora,
    Rejected,
    SchedulerStats,
    SessionClaim,
)
from proa.contract.pb import from_pb, write_pb
from proa.engine.v1 import service_pb2
from proa.engine.v1.service_pb2_grpc import EngineServiceStub
from proa_gateway.errors import LoraInvalid, LoraNotFound, LoraNotLoaded
from proa_gateway.routing.router import KvEventsRefused

SessionCall = grpc.aio.StreamStreamCall[service_pb2.SessionRequest, service_pb2.SessionResponse]
KvEventsCall = grpc.aio.UnaryStreamCall[service_pb2.SubscribeKvEventsRequest, service_pb2.SubscribeKvEventsResponse]
SessionRequest = service_pb2.SessionRequest
SessionMessage = EngineCoreOutputs | Hello | Rejected | Draining | LoadedLoras

_LORA_ERRORS: dict[grpc.StatusCode, type[LoraNotLoaded]] = {
    grpc.StatusCode.NOT_FOUND: LoraNotFound,
    grpc.StatusCode.INVALID_ARGUMENT: LoraInvalid,
    grpc.StatusCode.ALREADY_EXISTS: LoraInvalid,
}

MAX_TOKENIZER_BYTES = 2**28
"""Of all files of a tokenizer. The largest published ones have 35 MB."""
# The classes of a SessionResponse's messages, by their names in it.
_MESSAGES: dict[str, type[SessionMessage]] = {
    "outputs": EngineCoreOutputs,
    "hello": Hello,
    "rejected": Rejected,
    "draining": Draining,
    "loras": LoadedLoras,
}


def open_session(channel: grpc.aio.Channel) -> SessionCall:
    call: SessionCall = EngineServiceStub(channel).Session()
    return call


async def read_session(call: SessionCall) -> SessionMessage | None:
    """The engine's next message; None at the end of the stream. Messages that this gateway does not know are skipped.

    Raises `grpc.aio.AioRpcError` if the stream breaks.
    """
    while isinstance(message := await call.read(), service_pb2.SessionResponse):  # else grpc.aio.EOF
        name = message.WhichOneof("message")
        if name is not None:
            return from_pb(_MESSAGES[name], getattr(message, name))
    return None


async def wait_until_loaded(channel: grpc.aio.Channel) -> bool:
    """Wait until an engine that loads its model has loaded it. Returns False at once if the engine loads none.

    Raises `grpc.aio.AioRpcError`.
    """
    was_loading = False
    async for each in HealthStub(channel).Watch(HealthCheckRequest(service="startup")):
        if each.status == HealthCheckResponse.SERVING:
            return was_loading
        was_loading = True
    return False


async def wait_until_gone(channel: grpc.aio.Channel) -> bool:
    """Wait until an engine's process ends. Returns False at once if the engine does not answer."""
    has_answered = False
    with suppress(grpc.aio.AioRpcError):
        async for _ in HealthStub(channel).Watch(HealthCheckRequest()):
            has_answered = True
    return has_answered


def open_to_pb(client_id: str) -> SessionRequest:
    return SessionRequest(open=service_pb2.OpenSession(client_id=client_id))


def add_to_pb(handle: int, request: EngineCoreRequest) -> SessionRequest:
    message = SessionRequest()
    message.add.handle = handle
    write_pb(request, message.add.request)  # in place: a copy of an image's pixels takes milliseconds
    return message


def claim_to_pb(claim: SessionClaim) -> SessionRequest:
    return SessionRequest(claim=service_pb2.SessionClaim(num_blocks=claim.num_blocks, longest_wait=claim.longest_wait))


def abort_to_pb(handles: Sequence[int]) -> SessionRequest:
    return SessionRequest(abort=service_pb2.AbortHandles(handles=handles))


async def get_load(channel: grpc.aio.Channel, *, seconds: float) -> SchedulerStats:
    """This and the next calls raise `grpc.aio.AioRpcError`, after `seconds` at the latest."""
    answer = await EngineServiceStub(channel).GetLoad(service_pb2.GetLoadRequest(), timeout=seconds)
    return from_pb(SchedulerStats, answer.stats)


async def get_server_info(channel: grpc.aio.Channel, *, seconds: float) -> dict[str, Any]:
    """The engine's options."""
    answer = await EngineServiceStub(channel).GetServerInfo(service_pb2.GetServerInfoRequest(), timeout=seconds)
    options: dict[str, Any] = json.loads(answer.config)
    return options


async def reset_prefix_cache(channel: grpc.aio.Channel, *, since: float, seconds: float) -> None:
    """`since`: the same Unix time for all engines of a model, or they refuse each other's KV cache blocks."""
    request = service_pb2.ResetPrefixCacheRequest(since=since)
    await EngineServiceStub(channel).ResetPrefixCache(request, timeout=seconds)


async def sleep(channel: grpc.aio.Channel, *, level: int, wait: bool, since: float, seconds: float) -> None:
    """`since`: as for `reset_prefix_cache`."""
    request = service_pb2.SleepRequest(level=level, wait=wait, since=since)
    await EngineServiceStub(channel).Sleep(request, timeout=seconds)


async def wake_up(channel: grpc.aio.Channel, *, seconds: float) -> None:
    await EngineServiceStub(channel).WakeUp(service_pb2.WakeUpRequest(), timeout=seconds)


async def load_lora(channel: grpc.aio.Channel, lora: Lora, *, replace: bool, seconds: float) -> Lora:
    """The adapter as it was loaded: its digest need not be known before. Raises `LoraNotLoaded`."""
    request = service_pb2.LoadLoraRequest(name=lora.name, path=lora.path, replace=replace)
    try:
        answer = await EngineServiceStub(channel).LoadLora(request, timeout=seconds)
    except grpc.aio.AioRpcError as error:
        raise _LORA_ERRORS.get(error.code(), LoraNotLoaded)(error.details() or error.code().name) from error
    return from_pb(Lora, answer.lora)


async def unload_lora(channel: grpc.aio.Channel, *, name: str, seconds: float) -> None:
    """Raises `LoraNotLoaded`."""
    try:
        await EngineServiceStub(channel).UnloadLora(service_pb2.UnloadLoraRequest(name=name), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        raise _LORA_ERRORS.get(error.code(), LoraNotLoaded)(error.details() or error.code().name) from error


async def read_tokenizer_files(channel: grpc.aio.Channel, *, seconds: float) -> dict[str, bytes]:
    """The model's tokenizer files by name, in the order sent. Raises `ValueError` for more than `MAX_TOKENIZER_BYTES`,
    and `grpc.aio.AioRpcError`."""
    parts: AsyncIterable[service_pb2.GetTokenizerResponse]
    parts = EngineServiceStub(channel).GetTokenizer(service_pb2.GetTokenizerRequest(), timeout=seconds)
    files: dict[str, bytearray] = {}
    num_bytes = 0
    async for part in parts:
        num_bytes += len(part.data)
        if num_bytes > MAX_TOKENIZER_BYTES:
            raise ValueError(f"{part.file_name} and the files before it have more than {MAX_TOKENIZER_BYTES >> 20} MiB")
        files.setdefault(part.file_name, bytearray()).extend(part.data)
    return {name: bytes(data) for name, data in files.items()}


async def read_kv_events(channel: grpc.aio.Channel) -> AsyncGenerator[KvEvents, None]:
    """The changes of an engine's prefix cache, until the stream ends or breaks. Raises `KvEventsRefused`."""
    call: KvEventsCall = EngineServiceStub(channel).SubscribeKvEvents(service_pb2.SubscribeKvEventsRequest())
    try:
        async for message in call:
            yield from_pb(KvEvents, message)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED):
            raise KvEventsRefused(error.details()) from error
    finally:
        call.cancel()
