"""Between the wire and the gateway: the only file here that names protobuf messages.

Token ids travel as little-endian uint32 bytes, a step's plain tokens as two such columns; they are read in place.
"""

import sys
from array import array
from collections.abc import AsyncGenerator, AsyncIterable, Sequence

import grpc

from proa.blocks import HASH_BYTES, root_hash
from proa.engine.v1 import core_pb2, service_pb2
from proa.engine.v1.service_pb2_grpc import EngineServiceStub
from proa_gateway.routing.hints import HashChain
from proa_gateway.types import (
    Draining,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    Hello,
    KvEvents,
    KvEventsRefused,
    ModelInfo,
    Rejected,
    SamplingParams,
    StepOutputs,
    TokenLogprobs,
    Unknown,
)

SessionCall = grpc.aio.StreamStreamCall[service_pb2.SessionRequest, service_pb2.SessionResponse]
KvEventsCall = grpc.aio.UnaryStreamCall[service_pb2.SubscribeKvEventsRequest, service_pb2.SubscribeKvEventsResponse]
SessionRequest = service_pb2.SessionRequest
SessionMessage = StepOutputs | Hello | Rejected | Draining | Unknown


def open_session(channel: grpc.aio.Channel) -> SessionCall:
    call: SessionCall = EngineServiceStub(channel).Session()
    return call


async def read_tokenizer_files(channel: grpc.aio.Channel, *, seconds: float) -> dict[str, bytes]:
    """The model's tokenizer files by name, in the order sent. Raises `grpc.aio.AioRpcError`."""
    parts: AsyncIterable[service_pb2.GetTokenizerResponse]
    parts = EngineServiceStub(channel).GetTokenizer(service_pb2.GetTokenizerRequest(), timeout=seconds)
    files: dict[str, bytearray] = {}
    async for part in parts:
        files.setdefault(part.file_name, bytearray()).extend(part.data)
    return {name: bytes(data) for name, data in files.items()}


async def read_kv_events(channel: grpc.aio.Channel) -> AsyncGenerator[KvEvents, None]:
    """What an engine's prefix cache holds, as it changes, until the stream breaks. Raises `KvEventsRefused`."""
    call: KvEventsCall = EngineServiceStub(channel).SubscribeKvEvents(service_pb2.SubscribeKvEventsRequest())
    try:
        async for message in call:
            yield KvEvents(
                message.sequence, message.snapshot, _hashes_from_pb(message.stored), _hashes_from_pb(message.removed)
            )
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED):
            raise KvEventsRefused(error.details()) from error
    finally:
        call.cancel()


def open_to_pb(client_id: str) -> SessionRequest:
    return SessionRequest(open=service_pb2.OpenSession(client_id=client_id))


def add_to_pb(handle: int, request: EngineRequest) -> SessionRequest:
    message = core_pb2.EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=token_ids_to_pb(request.prompt_token_ids),
        sampling_params=sampling_params_to_pb(request.sampling_params),
        priority=request.priority,
        cache_salt=request.cache_salt,
        trace_headers=request.trace_headers,
        arrival_time=request.arrival_time,
        resumed_token_ids=token_ids_to_pb(request.resumed_token_ids),
    )
    return SessionRequest(add=service_pb2.AddRequest(handle=handle, request=message))


def abort_to_pb(handles: Sequence[int]) -> SessionRequest:
    return SessionRequest(abort=service_pb2.AbortHandles(handles=handles))


def sampling_params_to_pb(params: SamplingParams) -> core_pb2.SamplingParams:
    return core_pb2.SamplingParams(
        key=params.key,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words_token_ids=[core_pb2.TokenSequence(token_ids=word) for word in params.bad_words],
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


async def read_session(call: SessionCall) -> SessionMessage | None:
    """The engine's next message; None at the end. Raises `grpc.aio.AioRpcError` where the stream broke."""
    message = await call.read()
    if not isinstance(message, service_pb2.SessionResponse):  # grpc.aio.EOF
        return None
    return session_message_from_pb(message)


def session_message_from_pb(message: service_pb2.SessionResponse) -> SessionMessage:
    match message.WhichOneof("message"):
        case "outputs":
            return _outputs_from_pb(message.outputs)
        case "rejected":
            rejected = message.rejected
            return Rejected(rejected.handle, rejected.code, rejected.message, rejected.retryable)
        case "draining":
            return Draining()
        case "hello":
            return _hello_from_pb(message.hello)
        case _:
            return Unknown()


def token_ids_to_pb(token_ids: Sequence[int]) -> bytes:
    column = array("I", token_ids)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def token_ids_from_pb(data: bytes) -> Sequence[int]:
    if sys.byteorder == "big":
        column = array("I", data)
        column.byteswap()
        return column
    return memoryview(data).cast("I")


def _hashes_from_pb(data: bytes) -> list[bytes]:
    return [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]


def _outputs_from_pb(message: core_pb2.EngineCoreOutputs) -> StepOutputs:
    return StepOutputs(
        plain_handles=token_ids_from_pb(message.plain_handles),
        plain_token_ids=token_ids_from_pb(message.plain_token_ids),
        outputs=[(output.handle, _output_from_pb(output)) for output in message.outputs],
        stats=_stats_from_pb(message.stats) if message.HasField("stats") else None,
    )


def _output_from_pb(message: core_pb2.EngineCoreOutput) -> EngineOutput:
    reason = message.finish_reason
    return EngineOutput(
        new_token_ids=list(message.new_token_ids),
        logprobs=[_logprobs_from_pb(entry) for entry in message.logprobs],
        prompt_logprobs=[_logprobs_from_pb(entry) for entry in message.prompt_logprobs],
        finish_reason=FinishReason(reason) if reason else None,
        stop_reason=message.stop_reason if message.HasField("stop_reason") else None,
        num_cached_tokens=message.num_cached_tokens if message.HasField("num_cached_tokens") else None,
        error=message.error,
    )


def _logprobs_from_pb(message: core_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        message.token_id, message.logprob, message.rank, list(message.top_token_ids), list(message.top_logprobs)
    )


def _stats_from_pb(message: core_pb2.SchedulerStats) -> EngineStats:
    return EngineStats(
        num_running_reqs=message.num_running_reqs,
        num_waiting_reqs=message.num_waiting_reqs,
        kv_cache_usage=message.kv_cache_usage,
        last_step_age=message.last_step_age,
    )


def _hello_from_pb(message: service_pb2.Hello) -> Hello:
    model = message.model
    info = ModelInfo(
        model_name=model.model_name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        tokenizer_digest=model.tokenizer_digest,
        block_hash_version=model.block_hash_version,
        max_num_seqs=model.max_num_seqs,
        max_logprobs=model.max_logprobs,
        chain=HashChain(root_hash(model.model, model.revision), model.block_size),
        eos_token_ids=tuple(model.eos_token_ids),
    )
    return Hello(
        instance_id=message.instance_id,
        model=info,
        stats=_stats_from_pb(message.stats),
        num_cached_blocks=model.num_gpu_blocks if model.prefix_caching else 0,
    )
