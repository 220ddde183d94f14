"""A Session towards a gateway that reads, reads slowly, or does not read at all."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from proa.contract import EngineCoreOutput, EngineCoreRequest, FinishReason, ModelInfo, SchedulerStats
from proa.engine.v1 import service_pb2
from proa_engine.config import EngineConfig
from proa_engine.core.types import Rejection, StepOutputs
from proa_engine.metrics import EngineMetrics
from proa_engine.server.errors import SlowReader
from proa_engine.server.loaded_engine import LoadedEngine
from proa_engine.server.observer import RequestObserver
from proa_engine.server.request_router import RequestRouter
from proa_engine.server.session import Session
from proa_engine.telemetry import EngineTracer
from support.engine_client import engine_request, wait_until

MODEL = ModelInfo(
    model_name="m",
    model="m",
    revision="",
    max_model_len=64,
    vocab_size=100,
    block_size=16,
    num_gpu_blocks=8,
    block_hash_version=1,
    tokenizer_digest="",
    eos_token_ids=(),
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_logprobs=5,
    max_waiting_requests=9,
    prefix_caching=True,
    engine_version="0",
)


class FakeCore:
    def __init__(self) -> None:
        self.submitted: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.step_started_at: float | None = None

    def submit(self, request: EngineCoreRequest) -> None:
        self.submitted.append(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted.extend(request_ids)

    def follow_kv_events(self) -> None:
        raise NotImplementedError

    def unfollow_kv_events(self) -> None:
        raise NotImplementedError

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_running_reqs=len(self.submitted))


class Gateway:
    """The other end: messages go in by `say`, and come out in `heard` while `reads` is set."""

    def __init__(self) -> None:
        self.heard: list[service_pb2.SessionResponse] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._said: asyncio.Queue[service_pb2.SessionRequest | None] = asyncio.Queue()

    def say(self, **message: object) -> None:
        self._said.put_nowait(service_pb2.SessionRequest(**message))  # type: ignore[arg-type]

    def hang_up(self) -> None:
        self._said.put_nowait(None)

    def add(self, handle: int) -> None:
        self.say(add=service_pb2.AddRequest(handle=handle, request=engine_request(request_id=f"r{handle}")))

    async def messages(self) -> AsyncIterator[service_pb2.SessionRequest]:
        while (message := await self._said.get()) is not None:
            yield message

    async def write(self, message: service_pb2.SessionResponse) -> None:
        await self.reads.wait()
        self.heard.append(message)

    @property
    def outputs(self) -> list[service_pb2.SessionResponse]:
        return [message for message in self.heard if message.HasField("outputs")]


class World:
    """A router over a fake core, and one session on it."""

    def __init__(self, **options: int) -> None:
        self.core = FakeCore()
        self.router = RequestRouter()
        metrics = EngineMetrics(CollectorRegistry(), EngineConfig(model="m"), num_gpu_blocks=8)
        observer = RequestObserver(EngineTracer(), metrics)
        self.router.start(LoadedEngine(self.core, MODEL, (), lambda request: None, observer, instance_id="i"))
        self.gateway = Gateway()
        self.session = Session(self.router, lambda: None, **options)
        self.running = asyncio.create_task(self.session.run(self.gateway.messages(), self.gateway.write))

    def step(self, *outputs: EngineCoreOutput, rejections: tuple[Rejection, ...] = ()) -> None:
        self.router.deliver(StepOutputs(list(outputs), SchedulerStats(), 1.0, 1, rejections))

    def output(self, handle: int, *token_ids: int, **fields: object) -> EngineCoreOutput:
        client = self.core.submitted[0].client_index
        return EngineCoreOutput(request_id=f"r{handle}", client_index=client, new_token_ids=token_ids, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def world(num_requests: int = 2, **options: int) -> AsyncIterator[World]:
    made = World(**options)
    made.gateway.say(open=service_pb2.OpenSession(client_id="g"))
    for handle in range(1, num_requests + 1):
        made.gateway.add(handle)
    await wait_until(lambda: len(made.core.submitted) == num_requests)
    yield made
    made.running.cancel()
    await asyncio.gather(made.running, return_exceptions=True)


async def heard(made: World, condition: Callable[[], object]) -> None:
    await wait_until(condition)
    assert not made.running.done()


async def test_hello_comes_first() -> None:
    async with world() as made:
        assert made.gateway.heard[0].hello.instance_id == "i"


async def test_one_message_a_step_for_all_requests() -> None:
    async with world() as made:
        made.step(made.output(1, 10), made.output(2, 20))
        await heard(made, lambda: made.gateway.outputs)

        outputs = made.gateway.outputs[0].outputs
        assert outputs.plain_handles == b"\x01\0\0\0\x02\0\0\0"
        assert outputs.plain_token_ids == b"\x0a\0\0\0\x14\0\0\0"


async def test_steps_merge_while_the_gateway_does_not_read() -> None:
    async with world() as made:
        made.gateway.reads.clear()
        for token_id in range(10, 20):
            made.step(made.output(1, token_id))
            await asyncio.sleep(0)
        made.step(made.output(1, 20, finish_reason=FinishReason.LENGTH))
        made.gateway.reads.set()
        await heard(made, lambda: any(message.outputs.outputs for message in made.gateway.outputs))

        columns = b"".join(message.outputs.plain_token_ids for message in made.gateway.outputs)
        assert len(made.gateway.outputs) <= 2
        assert columns[::4] == bytes(range(10, 20))
        assert list(made.gateway.outputs[-1].outputs.outputs[0].new_token_ids) == [20]


async def test_session_of_a_gateway_that_never_reads_is_closed_and_its_requests_aborted() -> None:
    async with world(max_pending_bytes=1000) as made:
        made.gateway.reads.clear()
        for token_id in range(200):
            made.step(made.output(1, token_id))
            await asyncio.sleep(0)
        with pytest.raises(SlowReader, match="more than 1000 bytes"):
            await made.running

        assert sorted(made.core.aborted) == ["r1", "r2"]


async def test_silent_engine_still_sends_statistics_with_the_age_of_its_step() -> None:
    async with world() as made:
        made.core.step_started_at = 0.0  # long ago, on the monotonic clock
        await heard(made, lambda: made.gateway.outputs)

        stats = made.gateway.outputs[0].outputs.stats
        assert stats.num_running_reqs == 2
        assert stats.last_step_age > 0


async def test_hanging_up_aborts_what_runs() -> None:
    async with world() as made:
        made.step(made.output(1, 5, finish_reason=FinishReason.STOP))
        made.gateway.hang_up()
        await made.running

        assert made.core.aborted == ["r2"]


async def test_aborted_handles_reach_the_core_and_are_not_spoken_of_again() -> None:
    async with world() as made:
        made.gateway.say(abort=service_pb2.AbortHandles(handles=[1, 9]))
        await wait_until(lambda: made.core.aborted)
        made.step(made.output(1, 7), made.output(2, 8), made.output(1, finish_reason=FinishReason.ABORT))
        await heard(made, lambda: made.gateway.outputs)

        assert made.core.aborted == ["r1"]
        assert made.gateway.outputs[0].outputs.plain_handles == b"\x02\0\0\0"
        assert not made.gateway.outputs[0].outputs.outputs


async def test_rejection_by_the_core_names_the_handle() -> None:
    async with world() as made:
        client = made.core.submitted[0].client_index
        made.step(rejections=(Rejection("r2", client, "resource_exhausted", "the queue is full"),))
        await heard(made, lambda: made.gateway.heard[-1].HasField("rejected"))

        rejected = made.gateway.heard[-1].rejected
        assert (rejected.handle, rejected.message, rejected.retryable) == (2, "the queue is full", True)


async def test_drained_session_ends_with_its_last_request() -> None:
    async with world(num_requests=1) as made:
        made.router.drain()
        await heard(made, lambda: made.gateway.heard[-1].HasField("draining"))
        made.step(made.output(1, 5, finish_reason=FinishReason.STOP))
        await made.running

        assert made.gateway.heard[-1].outputs.outputs[0].handle == 1
        assert made.core.aborted == []


async def test_id_can_come_again_when_its_request_has_ended() -> None:
    async with world(num_requests=1) as made:
        made.step(made.output(1, 5, finish_reason=FinishReason.STOP))
        made.gateway.add(1)
        await wait_until(lambda: len(made.core.submitted) == 2)
