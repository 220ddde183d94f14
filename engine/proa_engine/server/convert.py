"""Between the wire and the core: the only file here that names protobuf messages, the servicer's signatures apart.

What is unset gets its default here; what is not valid becomes an `InvalidRequest` with a sentence. Token ids travel
as little-endian uint32 bytes, a step's plain tokens as two such columns.
"""

import secrets
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from proa.engine.v1 import core_pb2, service_pb2
from proa_engine.core.kv_events import KvChanges
from proa_engine.core.sampling_params import SamplingParams
from proa_engine.core.types import EngineCoreOutput, EngineCoreRequest, SchedulerStats, TokenLogprobs
from proa_engine.server.errors import EngineError, InvalidRequest, status_number
from proa_engine.server.model_info import ModelInfo
from proa_engine.server.pending import OutputBatch
from proa_engine.telemetry import TRACE_HEADERS

SessionRequest = service_pb2.SessionRequest
SessionResponse = service_pb2.SessionResponse
SERVICE = service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
MAX_REQUEST_ID_BYTES = 256
FILE_PART_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Open:
    """A gateway introduces itself."""

    client_id: str


@dataclass(frozen=True, slots=True)
class Add:
    """A gateway adds a request. `error` instead of it where it is not valid; the handle is known all the same."""

    handle: int
    request: EngineCoreRequest | InvalidRequest


@dataclass(frozen=True, slots=True)
class AbortHandles:
    """A gateway ends some of its requests."""

    handles: tuple[int, ...]


def tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The deserializer, but with `None` for bytes that are no message."""

    def deserialize_or_none(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return None

    return deserialize_or_none


def session_message_from_pb(message: service_pb2.SessionRequest | None, *, now: float) -> Open | Add | AbortHandles:
    """Raises InvalidRequest for what breaks the session: no message, one that says nothing, a handle of zero."""
    if message is None:
        raise InvalidRequest("the bytes are not a session message")
    match message.WhichOneof("message"):
        case "open":
            return Open(message.open.client_id)
        case "add":
            if message.add.handle == 0:
                raise InvalidRequest("handle must be above zero")
            try:
                return Add(message.add.handle, request_from_pb(message.add.request, now=now))
            except InvalidRequest as error:
                return Add(message.add.handle, error)
        case "abort":
            return AbortHandles(tuple(message.abort.handles))
        case _:
            raise InvalidRequest("a session message must be one of open, add, abort")


def request_from_pb(
    message: core_pb2.EngineCoreRequest, *, now: float, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> EngineCoreRequest:
    """`now` stands in for an arrival time that is unset, the call's `metadata` for trace headers. An empty request_id
    is drawn."""
    if len(message.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise InvalidRequest(f"request_id must not be longer than {MAX_REQUEST_ID_BYTES} bytes")
    if not 0 <= message.arrival_time < float("inf"):
        raise InvalidRequest("arrival_time must be a finite number of seconds since 1970")
    return EngineCoreRequest(
        request_id=message.request_id or secrets.token_hex(16),
        prompt_token_ids=token_ids_from_pb("prompt_token_ids", message.prompt_token_ids),
        sampling_params=sampling_params_from_pb(message.sampling_params),
        priority=message.priority,
        cache_salt=message.cache_salt,
        trace_headers=dict(message.trace_headers)
        or {key: str(value) for key, value in metadata if key in TRACE_HEADERS},
        resumed_token_ids=token_ids_from_pb("resumed_token_ids", message.resumed_token_ids),
        arrival_time=message.arrival_time or now,
    )


def sampling_params_from_pb(message: core_pb2.SamplingParams) -> SamplingParams:
    def optional(name: str, default: Any) -> Any:
        return getattr(message, name) if message.HasField(name) else default

    try:
        return SamplingParams(
            key=optional("key", None) if message.HasField("key") else secrets.randbits(64),
            temperature=optional("temperature", 1.0),
            top_p=optional("top_p", 1.0),
            top_k=message.top_k,
            min_p=message.min_p,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=optional("repetition_penalty", 1.0),
            logit_bias=dict(message.logit_bias),
            allowed_token_ids=tuple(message.allowed_token_ids),
            bad_words_token_ids=tuple(tuple(word.token_ids) for word in message.bad_words),
            max_tokens=optional("max_tokens", None),
            min_tokens=message.min_tokens,
            stop_token_ids=tuple(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            logprobs=optional("logprobs", None),
            prompt_logprobs=optional("prompt_logprobs", None),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def token_ids_from_pb(name: str, data: bytes) -> list[int]:
    if len(data) % 4:
        raise InvalidRequest(f"{name} must be little-endian uint32, so a multiple of 4 bytes, not {len(data)}")
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def token_ids_to_pb(ids: "array[int]") -> bytes:
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    return ids.tobytes()


def output_to_pb(output: EngineCoreOutput, handle: int = 0) -> core_pb2.EngineCoreOutput:
    """With a handle the request's id is left out."""
    finished = output.finish_reason is not None
    message = core_pb2.EngineCoreOutput(
        request_id="" if handle else output.request_id,
        handle=handle,
        new_token_ids=output.new_token_ids,
        logprobs=_logprobs_to_pb(output.logprobs),
        prompt_logprobs=_logprobs_to_pb(output.prompt_logprobs),
        finish_reason=int(output.finish_reason or 0),  # type: ignore[arg-type]
        stop_reason=output.stop_reason,
        events=[core_pb2.Event(type=int(event.type), timestamp=event.timestamp) for event in output.events],  # type: ignore[arg-type]
        error=output.error,
    )
    if finished or output.num_prompt_tokens:
        message.num_prompt_tokens = output.num_prompt_tokens
        message.num_cached_tokens = output.num_cached_tokens
    if finished:
        message.num_output_tokens = output.num_output_tokens
    return message


def _logprobs_to_pb(entries: Iterable[TokenLogprobs]) -> Iterator[core_pb2.TokenLogprobs]:
    for entry in entries:
        yield core_pb2.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top_token_ids=entry.top_token_ids,
            top_logprobs=entry.top_logprobs,
        )


def stats_to_pb(stats: SchedulerStats, last_step_age: float) -> core_pb2.SchedulerStats:
    """`last_step_age` in seconds, zero when idle."""
    return core_pb2.SchedulerStats(
        num_running_reqs=stats.num_running_reqs,
        num_waiting_reqs=stats.num_waiting_reqs,
        kv_cache_usage=stats.kv_cache_usage,
        num_waiting_tokens=stats.num_waiting_tokens,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
        num_preemptions=stats.num_preemptions,
        last_step_age=last_step_age,
    )


def model_info_to_pb(info: ModelInfo) -> service_pb2.GetModelInfoResponse:
    return service_pb2.GetModelInfoResponse(
        model_name=info.model_name,
        model=info.model,
        revision=info.revision,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        block_size=info.block_size,
        num_gpu_blocks=info.num_gpu_blocks,
        block_hash_version=info.block_hash_version,
        tokenizer_digest=info.tokenizer_digest,
        eos_token_ids=info.eos_token_ids,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_logprobs=info.max_logprobs,
        max_waiting_requests=info.max_waiting_requests,
        prefix_caching=info.prefix_caching,
        engine_version=info.engine_version,
    )


def hello_to_pb(info: ModelInfo, stats: SchedulerStats, last_step_age: float) -> service_pb2.SessionResponse:
    hello = service_pb2.Hello(
        instance_id=info.instance_id, model=model_info_to_pb(info), stats=stats_to_pb(stats, last_step_age)
    )
    return service_pb2.SessionResponse(hello=hello)


def outputs_to_pb(
    batch: OutputBatch, stats: SchedulerStats, last_step_age: float, timestamp: float, step: int
) -> service_pb2.SessionResponse:
    outputs = core_pb2.EngineCoreOutputs(
        outputs=[output_to_pb(output, handle) for handle, output in batch.outputs.items()],
        plain_handles=token_ids_to_pb(batch.plain_handles),
        plain_token_ids=token_ids_to_pb(batch.plain_token_ids),
        stats=stats_to_pb(stats, last_step_age),
        timestamp=timestamp,
        step=step,
    )
    return service_pb2.SessionResponse(outputs=outputs)


def rejected_to_pb(handle: int, error: EngineError) -> service_pb2.SessionResponse:
    rejected = service_pb2.Rejected(
        handle=handle, code=status_number(error), message=str(error), retryable=error.retryable
    )
    return service_pb2.SessionResponse(rejected=rejected)


def draining_to_pb() -> service_pb2.SessionResponse:
    return service_pb2.SessionResponse(draining=service_pb2.Draining())


def generate_to_pb(output: EngineCoreOutput) -> service_pb2.GenerateResponse:
    return service_pb2.GenerateResponse(output=output_to_pb(output))


def tokenizer_files_to_pb(files: Iterable[tuple[str, bytes]]) -> Iterator[service_pb2.GetTokenizerResponse]:
    for name, data in files:
        for start in range(0, max(len(data), 1), FILE_PART_BYTES):
            yield service_pb2.GetTokenizerResponse(file_name=name, data=data[start : start + FILE_PART_BYTES])


def load_to_pb(stats: SchedulerStats, last_step_age: float) -> service_pb2.GetLoadResponse:
    return service_pb2.GetLoadResponse(stats=stats_to_pb(stats, last_step_age))


def kv_changes_to_pb(sequence: int, changes: KvChanges) -> service_pb2.SubscribeKvEventsResponse:
    return service_pb2.SubscribeKvEventsResponse(
        sequence=sequence,
        snapshot=changes.is_snapshot,
        stored=b"".join(changes.stored),
        removed=b"".join(changes.removed),
    )


def abort_to_pb() -> service_pb2.AbortResponse:
    return service_pb2.AbortResponse()


def health_to_pb(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    status = health_pb2.HealthCheckResponse.ServingStatus
    return status.SERVING if serving else status.NOT_SERVING
