"""A Session whose gateway reads at once, slowly or not at all."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from prometheus_client import CollectorRegistry

from proa.contract import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LoadedLoras,
    Lora,
    SchedulerStats,
)
from proa.engine.v1 import core_pb2, service_pb2
from proa_engine.config import EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.operations import EndStream, Operation
from proa_engine.core.types import PlainTokens, Rejection, StepOutputs
from proa_engine.observability.metrics import EngineMetrics
from proa_engine.observability.telemetry import NoEngineTracer
from proa_engine.server.errors import SlowReader
from proa_engine.server.loaded_engine import LoadedEngine, RequestObserver
from proa_engine.server.request_router import RequestRouter
from proa_engine.server.session import Session
from support.engine_client import engine_request, wait_until
from support.model_info import model_info

T = TypeVar("T")
LORA = Lora(name="a", path="/a", digest="0" * 64)


class NothingRetained:
    def num_blocks_of(self, owner: int) -> int:
        return 0


class FakeCore:
    retention = NothingRetained()

    def __init__(self) -> None:
        self.submitted: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.ended: list[int] = []
        self.step_started_at: float | None = None

    def submit(self, request: EngineCoreRequest) -> None:
        self.submitted.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted.extend(request_ids)

    def follow_kv_events(self) -> None:
        raise NotImplementedError

    def unfollow_kv_events(self) -> None:
        raise NotImplementedError

    def operate(self, operation: Operation[T]) -> "Future[T]":
        if isinstance(operation, EndStream):
            self.ended.append(operation.client_index)
        return operation.done

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running_reqs=len(self.submitted))


class Gateway:
    """The client: `send` queues a message to the session; `received` has the session's, read while `reads` is set."""

    def __init__(self) -> None:
        self.received: list[service_pb2.SessionResponse] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._sent: asyncio.Queue[service_pb2.SessionRequest | None] = asyncio.Queue()

    def send(self, **message: object) -> None:
        self._sent.put_nowait(service_pb2.SessionRequest(**message))  # type: ignore[arg-type]

    def close(self) -> None:
        self._sent.put_nowait(None)

    def add(self, handle: int) -> None:
        self.send(add=service_pb2.AddRequest(handle=handle, request=engine_request(request_id=f"r{handle}")))

    async def requests(self) -> AsyncIterator[service_pb2.SessionRequest]:
        while (message := await self._sent.get()) is not None:
            yield message

    async def write(self, message: service_pb2.SessionResponse) -> None:
        await self.reads.wait()
        self.received.append(message)

    @property
    def heartbeats(self) -> list[core_pb2.SchedulerStats]:
        """Statistics alone, which come at any time."""
        return [message.outputs.stats for message in self.received if is_heartbeat(message)]

    @property
    def messages(self) -> list[service_pb2.SessionResponse]:
        return [message for message in self.received if not is_heartbeat(message)]

    @property
    def outputs(self) -> list[service_pb2.SessionResponse]:
        return [message for message in self.messages if message.HasField("outputs")]


def is_heartbeat(message: service_pb2.SessionResponse) -> bool:
    return message.HasField("outputs") and not (message.outputs.outputs or message.outputs.plain_handles)


class SessionUnderTest:
    """A router over a fake core, and one session on it."""

    def __init__(self, **options: int) -> None:
        self.core = FakeCore()
        self.router = RequestRouter()
        config = EngineConfig(model="m")
        groups = CacheGroups(num_blocks=8, block_size=config.block_size)
        metrics = EngineMetrics(CollectorRegistry(), config, cache_groups=groups, max_model_len=64)
        observer = RequestObserver(NoEngineTracer(), metrics)
        loras = LoadedLoras(loras=(LORA,))
        engine = LoadedEngine(
            self.core, model_info(), config, (), lambda request: None, observer, loras, instance_id="i"
        )
        self.router.start(engine)
        self.gateway = Gateway()
        self.session = Session(self.router, lambda: None, **options)
        self.running = asyncio.create_task(self.session.run(self.gateway.requests(), self.gateway.write))

    def told(self, stream_id: int) -> SchedulerStats:
        """What a stream is told; there is none of the number 0."""
        return self.router.load_beside(stream_id)

    def step(self, *outputs: EngineCoreOutput, rejections: tuple[Rejection, ...] = ()) -> None:
        self.router.deliver(StepOutputs(list(outputs), 1.0, 1, rejections=rejections))

    def plain_step(self, tokens: PlainTokens) -> None:
        self.router.deliver(StepOutputs([], 1.0, 1, tokens))

    def output(self, handle: int, *token_ids: int, **fields: object) -> EngineCoreOutput:
        client = self.core.submitted[0].client_index
        return EngineCoreOutput(request_id=f"r{handle}", client_index=client, new_token_ids=token_ids, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def open_session(num_requests: int = 2, **options: int) -> AsyncIterator[SessionUnderTest]:
    case = SessionUnderTest(**options)
    case.gateway.send(open=service_pb2.OpenSession(client_id="g"))
    for handle in range(1, num_requests + 1):
        case.gateway.add(handle)
    await wait_until(lambda: len(case.core.submitted) == num_requests)
    yield case
    case.running.cancel()
    await asyncio.gather(case.running, return_exceptions=True)


async def received(case: SessionUnderTest, condition: Callable[[], object]) -> None:
    await wait_until(condition)
    assert not case.running.done()


async def test_hello_comes_first_and_before_any_step_has_the_adapters_loaded_at_the_start() -> None:
    async with open_session() as case:
        hello = case.gateway.messages[0].hello
        assert hello.instance_id == "i"
        assert [lora.name for lora in hello.loras.loras] == ["a"]


async def test_one_message_a_step_for_all_requests() -> None:
    async with open_session() as case:
        case.step(case.output(1, 10), case.output(2, 20))
        await received(case, lambda: case.gateway.outputs)

        outputs = case.gateway.outputs[0].outputs
        assert outputs.plain_handles == b"\x01\0\0\0\x02\0\0\0"
        assert outputs.plain_token_ids == b"\x0a\0\0\0\x14\0\0\0"


async def test_a_steps_plain_tokens_are_its_message_without_those_of_aborted_requests() -> None:
    request_ids = ["r2", "r1", "r3", "another session's"]
    async with open_session(num_requests=3) as case:
        case.plain_step(PlainTokens(request_ids, [20, 10, 30, 40]))
        await received(case, lambda: len(case.gateway.outputs) == 1)
        case.plain_step(PlainTokens(request_ids, [21, 11, 31, 41]))
        await received(case, lambda: len(case.gateway.outputs) == 2)
        case.gateway.send(abort=service_pb2.AbortHandles(handles=[1]))
        await wait_until(lambda: case.core.aborted)
        case.plain_step(PlainTokens(request_ids, [22, 12, 32, 42]))
        await received(case, lambda: len(case.gateway.outputs) == 3)

        messages = [message.outputs for message in case.gateway.outputs]
        assert [list(message.plain_handles[::4]) for message in messages] == [[2, 1, 3], [2, 1, 3], [2, 3]]
        assert [list(message.plain_token_ids[::4]) for message in messages] == [[20, 10, 30], [21, 11, 31], [22, 32]]


async def test_gateways_are_told_what_others_claim_and_not_what_they_claim_themselves() -> None:
    async with open_session() as case:
        case.gateway.send(claim=service_pb2.SessionClaim(num_blocks=5, longest_wait=1.5))
        await wait_until(lambda: case.told(0).num_claimed_elsewhere == 5)
        assert case.told(0).longest_wait_elsewhere == 1.5
        case.session.load_changed()
        await received(case, lambda: case.gateway.heartbeats)
        assert case.gateway.heartbeats[-1].num_claimed_elsewhere == 0


async def test_outputs_of_aborted_requests_are_dropped() -> None:
    async with open_session(num_requests=2) as case:
        case.gateway.send(abort=service_pb2.AbortHandles(handles=[1]))
        await wait_until(lambda: case.core.aborted)
        case.step(*(case.output(handle, 20, finish_reason=FinishReason.STOP) for handle in (1, 2)))
        await received(case, lambda: len(case.gateway.outputs) == 1)

        assert [output.handle for output in case.gateway.outputs[0].outputs.outputs] == [2]


async def test_steps_merge_while_the_gateway_does_not_read() -> None:
    async with open_session() as case:
        case.gateway.reads.clear()
        for token_id in range(10, 20):
            case.step(case.output(1, token_id))
            await asyncio.sleep(0)
        case.step(case.output(1, 20, finish_reason=FinishReason.LENGTH))
        case.gateway.reads.set()
        await received(case, lambda: any(message.outputs.outputs for message in case.gateway.outputs))

        columns = b"".join(message.outputs.plain_token_ids for message in case.gateway.outputs)
        assert len(case.gateway.outputs) <= 2
        assert columns[::4] == bytes(range(10, 20))
        assert list(case.gateway.outputs[-1].outputs.outputs[0].new_token_ids) == [20]


async def test_session_with_too_many_unread_bytes_is_closed_and_its_requests_aborted() -> None:
    async with open_session(max_pending_bytes=1000) as case:
        case.gateway.reads.clear()
        for token_id in range(200):
            case.step(case.output(1, token_id))
            await asyncio.sleep(0)
        with pytest.raises(SlowReader, match="more than 1000 bytes"):
            await case.running

        assert sorted(case.core.aborted) == ["r1", "r2"]


async def test_pooled_values_larger_than_the_limit_of_other_outputs_are_delivered() -> None:
    async with open_session(max_pending_bytes=1000) as case:
        case.step(case.output(1, finish_reason=FinishReason.STOP, pooled=bytes(4000), num_pooled_rows=1))
        await received(case, lambda: case.gateway.outputs)

        assert case.gateway.outputs[0].outputs.outputs[0].pooled == bytes(4000)


async def test_session_with_too_many_unread_pooled_values_is_closed() -> None:
    async with open_session(max_pending_pooled_bytes=6000) as case:
        for handle in (1, 2):
            case.step(case.output(handle, finish_reason=FinishReason.STOP, pooled=bytes(4000), num_pooled_rows=1))
        with pytest.raises(SlowReader, match="more than 6000 bytes of pooled values"):
            await case.running


async def test_statistics_are_sent_while_a_step_runs_with_its_age() -> None:
    async with open_session() as case:
        case.core.step_started_at = 0.0  # long ago, on the monotonic clock
        await received(case, lambda: any(stats.last_step_age > 0 for stats in case.gateway.heartbeats))

        assert case.gateway.heartbeats[-1].num_running_reqs == 2


async def test_closed_session_aborts_its_unfinished_requests() -> None:
    async with open_session() as case:
        case.step(case.output(1, 5, finish_reason=FinishReason.STOP))
        case.gateway.close()
        await case.running

        assert case.core.aborted == ["r2"]
        assert case.core.ended == [1]


async def test_aborted_requests_are_aborted_in_the_core_and_get_no_more_output() -> None:
    async with open_session() as case:
        case.gateway.send(abort=service_pb2.AbortHandles(handles=[1, 9]))
        await wait_until(lambda: case.core.aborted)
        case.step(case.output(1, 7), case.output(2, 8), case.output(1, finish_reason=FinishReason.ABORT))
        await received(case, lambda: case.gateway.outputs)

        assert case.core.aborted == ["r1"]
        assert case.gateway.outputs[0].outputs.plain_handles == b"\x02\0\0\0"
        assert not case.gateway.outputs[0].outputs.outputs


async def test_rejection_by_the_core_names_the_handle() -> None:
    async with open_session() as case:
        client = case.core.submitted[0].client_index
        case.step(rejections=(Rejection("r2", client, "resource_exhausted", "the queue is full"),))
        await received(case, lambda: case.gateway.messages[-1].HasField("rejected"))

        rejected = case.gateway.messages[-1].rejected
        assert (rejected.handle, rejected.message, rejected.retryable) == (2, "the queue is full", True)


async def test_drained_session_ends_with_its_last_request() -> None:
    async with open_session(num_requests=1) as case:
        case.router.drain()
        await received(case, lambda: case.gateway.messages[-1].HasField("draining"))
        case.step(case.output(1, 5, finish_reason=FinishReason.STOP))
        await case.running

        assert case.gateway.messages[-1].outputs.outputs[0].handle == 1
        assert case.core.aborted == []


async def test_request_id_and_handle_can_be_reused_after_the_request_ended() -> None:
    async with open_session(num_requests=1) as case:
        case.step(case.output(1, 5, finish_reason=FinishReason.STOP))
        case.gateway.add(1)
        await wait_until(lambda: len(case.core.submitted) == 2)
