"""EngineServicer: the methods of EngineService, each a conversion around one call of the request router."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from proa.engine.v1 import service_pb2, service_pb2_grpc
from proa_engine.core.lora_store import LoraError
from proa_engine.core.operations import ResetPrefixCache, WakeUp
from proa_engine.server import convert
from proa_engine.server.errors import EngineError, status_code
from proa_engine.server.generate_call import GenerateCall
from proa_engine.server.request_router import RequestRouter, check_media, hash_embeds
from proa_engine.server.session import Session

Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(service_pb2_grpc.EngineServiceServicer):
    """`on_session` is called whenever a gateway opens a session."""

    def __init__(self, router: RequestRouter, on_session: Callable[[], None]) -> None:
        self._router = router
        self._on_session = on_session

    async def Generate(self, request: service_pb2.GenerateRequest, context: Context) -> None:
        async with _status_on_error(context), GenerateCall(self._router) as call:
            metadata, vocab_size = context.invocation_metadata() or (), self._router.engine.info.vocab_size
            converted = convert.request_from_pb(
                request.request, now=time.time(), vocab_size=vocab_size, metadata=metadata
            )
            await check_media(converted)
            call.submit(await hash_embeds(converted))
            async for output in call.outputs():
                await context.write(convert.generate_to_pb(output))

    async def Session(self, messages: AsyncIterator[service_pb2.SessionRequest], context: Context) -> None:
        async with _status_on_error(context):
            await Session(self._router, self._on_session).run(messages, context.write)

    async def Abort(self, request: service_pb2.AbortRequest, context: Context) -> service_pb2.AbortResponse:
        self._router.abort(request.request_ids)
        return service_pb2.AbortResponse()

    async def GetModelInfo(
        self, request: service_pb2.GetModelInfoRequest, context: Context
    ) -> service_pb2.GetModelInfoResponse:
        async with _status_on_error(context):
            return convert.model_info_to_pb(self._router.engine.info)

    async def GetTokenizer(self, request: service_pb2.GetTokenizerRequest, context: Context) -> None:
        async with _status_on_error(context):
            for part in convert.tokenizer_files_to_pb(self._router.engine.tokenizer_files):
                await context.write(part)

    async def GetLoad(self, request: service_pb2.GetLoadRequest, context: Context) -> service_pb2.GetLoadResponse:
        return convert.load_to_pb(self._router.load())

    async def SubscribeKvEvents(self, request: service_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        async with _status_on_error(context):
            with self._router.subscribe_kv_events() as subscription:
                while True:
                    await context.write(convert.kv_events_to_pb(*await subscription.next_message()))

    async def GetServerInfo(
        self, request: service_pb2.GetServerInfoRequest, context: Context
    ) -> service_pb2.GetServerInfoResponse:
        async with _status_on_error(context):
            return convert.server_info_to_pb(self._router.engine.config)

    async def ResetPrefixCache(
        self, request: service_pb2.ResetPrefixCacheRequest, context: Context
    ) -> service_pb2.ResetPrefixCacheResponse:
        async with _status_on_error(context):
            await self._router.operate(ResetPrefixCache(request.since))
        return service_pb2.ResetPrefixCacheResponse()

    async def Sleep(self, request: service_pb2.SleepRequest, context: Context) -> service_pb2.SleepResponse:
        async with _status_on_error(context):
            await self._router.operate(convert.sleep_from_pb(request))
        return service_pb2.SleepResponse()

    async def WakeUp(self, request: service_pb2.WakeUpRequest, context: Context) -> service_pb2.WakeUpResponse:
        async with _status_on_error(context):
            await self._router.operate(WakeUp())
        return service_pb2.WakeUpResponse()

    async def LoadLora(self, request: service_pb2.LoadLoraRequest, context: Context) -> service_pb2.LoadLoraResponse:
        async with _status_on_error(context):
            info = self._router.engine.info
            operation = convert.load_lora_from_pb(request, (info.model_name, *info.aliases))
            return convert.load_lora_to_pb(await self._router.operate(operation))

    async def UnloadLora(
        self, request: service_pb2.UnloadLoraRequest, context: Context
    ) -> service_pb2.UnloadLoraResponse:
        async with _status_on_error(context):
            await self._router.operate(convert.unload_lora_from_pb(request))
        return service_pb2.UnloadLoraResponse()


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Answers undecodable bytes with INVALID_ARGUMENT, where gRPC would answer UNKNOWN and log a traceback.

    In a Session's stream an undecodable message becomes `None`, which the session rejects.
    """

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(f"/{convert.SERVICE}/"):
            return handler
        changes: dict[str, Any] = {"request_deserializer": convert.tolerant(handler.request_deserializer)}
        if not handler.request_streaming:
            kind = "unary_stream" if handler.response_streaming else "unary_unary"
            changes[kind] = _reject_undecodable(getattr(handler, kind))
        return handler._replace(**changes)


def _reject_undecodable(method: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
    async def reject_or_call(request: Any, context: Context) -> Any:
        if request is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the bytes are not a message of this method")
        return await method(request, context)

    return reject_or_call


@asynccontextmanager
async def _status_on_error(context: Context) -> AsyncIterator[None]:
    """Abort the call with the status code and message of an error."""
    try:
        yield
    except (EngineError, LoraError) as error:
        await context.abort(status_code(error), str(error))
