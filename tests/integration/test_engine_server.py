"""The engine's gRPC server with the fake executor: Generate, Session, and how requests end."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from proa.contract import SamplingParams
from proa.contract.session import MAX_TEXT_MESSAGE_BYTES
from proa.engine.v1 import core_pb2, service_pb2, service_pb2_grpc
from proa.tokenizer_files import digest
from support.engine_client import DEADLINE, SessionClient, generate, generate_request, wait_until
from support.engine_server import LoadedFakeExecutor, RunningServer, running_server
from support.fake_executor import generate as expected_tokens

Stub = service_pb2_grpc.EngineServiceStub


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
async def stub(server: RunningServer) -> AsyncIterator[Stub]:
    async with server.channel() as channel:
        yield server.stub(channel)


class Gate:
    """Blocks the fake device: it finishes one step per permit."""

    def __init__(self) -> None:
        self.executor = LoadedFakeExecutor(while_waiting=self._pass)
        self._permits = threading.Semaphore(0)

    def open(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def _pass(self) -> None:
        assert self._permits.acquire(timeout=DEADLINE), "the test let no more steps pass"


class Spy:
    """Counts calls of the core's `abort` and `submit`."""

    def __init__(self, server: RunningServer, method: Literal["abort", "submit"]) -> None:
        self._count = 0
        self._call = getattr(server.parts.core, method)
        setattr(server.parts.core, method, self._on_call)

    async def wait(self, count: int = 1) -> None:
        await wait_until(lambda: self._count >= count)

    def _on_call(self, argument: Any) -> None:
        self._call(argument)
        self._count += 1


def expected(prompt: list[int], max_tokens: int = 4) -> list[int]:
    return expected_tokens(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), frozenset(), 128)


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read a streaming call to its end; return its status."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), caught.value.details() or ""


async def test_generate_streams_the_tokens_of_one_request(stub: Stub) -> None:
    responses = [response.output async for response in stub.Generate(generate_request([5, 6, 7]), timeout=DEADLINE)]

    assert [token_id for output in responses for token_id in output.new_token_ids] == expected([5, 6, 7])
    assert responses[-1].finish_reason == core_pb2.FINISH_REASON_LENGTH
    assert (responses[0].num_prompt_tokens, responses[-1].num_output_tokens) == (3, 4)
    assert responses[0].events[0].type == core_pb2.EVENT_TYPE_QUEUED


async def test_a_prompt_that_is_only_computed_gets_one_output_and_is_cached(stub: Stub) -> None:
    message = generate_request(list(range(17)))
    message.request.prefill_only = True
    (output,) = [response.output async for response in stub.Generate(message, timeout=DEADLINE)]
    assert output.finish_reason == core_pb2.FINISH_REASON_STOP
    assert not output.new_token_ids
    assert (output.num_prompt_tokens, output.num_output_tokens) == (17, 0)
    responses = [response async for response in stub.Generate(generate_request(list(range(17))), timeout=DEADLINE)]
    assert responses[0].output.num_cached_tokens == 16


async def test_prompts_that_are_only_computed_are_rejected_with_a_sentence(stub: Stub) -> None:
    message = generate_request([1, 2, 3])
    message.request.prefill_only = True
    message.request.sampling_params.prompt_logprobs = 0
    code, text = await code_of(stub.Generate(message, timeout=DEADLINE))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == "a prefill_only request cannot have prompt_logprobs"


async def test_session_carries_many_requests(stub: Stub) -> None:
    session = await SessionClient(stub).open()
    for handle in range(1, 9):
        await session.add(handle, [handle, handle + 1], max_tokens=10)
    await session.read_until_finished(*range(1, 9))

    assert session.hello is not None
    assert session.hello.model.max_model_len == 128
    assert session.tokens == {handle: expected([handle, handle + 1], 10) for handle in range(1, 9)}


async def test_sessions_get_only_outputs_of_their_own_requests(stub: Stub) -> None:
    first, second = await SessionClient(stub).open(), await SessionClient(stub).open()
    await first.add(1, [1])
    await second.add(1, [2])
    await asyncio.gather(first.read_until_finished(1), second.read_until_finished(1))

    assert (first.tokens, second.tokens) == ({1: expected([1])}, {1: expected([2])})


async def test_cancelled_call_frees_its_blocks_within_two_steps() -> None:
    gate = Gate()
    with running_server(gate.executor) as server:
        async with server.channel() as channel:
            spy = Spy(server, "abort")
            call = server.stub(channel).Generate(generate_request([1] * 20, max_tokens=100), timeout=DEADLINE)
            gate.open(3)
            await call.read()
            assert server.parts.core.stats().kv_cache_usage > 0
            call.cancel()
            await spy.wait()
            num_steps = len(gate.executor.plans)
            gate.open(2)
            load = service_pb2.GetLoadRequest()
            while (await server.stub(channel).GetLoad(load, timeout=DEADLINE)).stats.kv_cache_usage:
                assert len(gate.executor.plans) <= num_steps + 2
            gate.open(100)


async def test_deadline_ends_a_request() -> None:
    gate = Gate()
    with running_server(gate.executor) as server:
        async with server.channel() as channel:
            spy = Spy(server, "abort")
            code, _ = await code_of(server.stub(channel).Generate(generate_request(max_tokens=100), timeout=0.3))
            await spy.wait()
            gate.open(200)

            assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_end_of_a_session_aborts_its_requests() -> None:
    gate = Gate()
    with running_server(gate.executor) as server:
        async with server.channel() as channel:
            spy = Spy(server, "abort")
            session = await SessionClient(server.stub(channel)).open()
            await session.add(1, max_tokens=100)
            gate.open(2)
            await session.read()
            session.call.cancel()
            await spy.wait()
            gate.open(200)


async def test_lost_connection_aborts_a_session() -> None:
    gate = Gate()
    with running_server(gate.executor) as server:
        spy = Spy(server, "abort")
        channel = server.channel()
        session = await SessionClient(server.stub(channel)).open()
        await session.add(1, max_tokens=100)
        gate.open(2)
        await session.read()
        await channel.close()
        await spy.wait()
        gate.open(200)


async def test_dropped_sessions_leave_no_requests_and_no_blocks() -> None:
    executor = LoadedFakeExecutor(num_blocks=256, max_model_len=4096)
    with running_server(executor) as server:
        async with server.channel() as channel:
            for cut in range(60):
                await drop_session(server.stub(channel), [1 + cut % 9] * 8, num_messages=cut % 3)
        for cut in range(10):
            async with server.channel() as channel:  # its end drops the session too
                await drop_session(server.stub(channel), [1 + cut] * 8, num_messages=cut % 3, cancel=False)
        stats = server.parts.core.stats
        await wait_until(lambda: stats().num_running_reqs + stats().num_waiting_reqs + stats().kv_cache_usage == 0)
        async with server.channel() as channel:
            assert await generate(server.stub(channel), [1], max_tokens=4) == expected([1])


async def drop_session(stub: Stub, prompt: list[int], *, num_messages: int, cancel: bool = True) -> None:
    session = await SessionClient(stub).open()
    await session.add(1, prompt, max_tokens=1000)
    for _ in range(num_messages):
        await session.read()
    if cancel:
        session.call.cancel()


async def test_abort_by_id_ends_requests_of_any_client() -> None:
    gate = Gate()
    with running_server(gate.executor) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            call = stub.Generate(generate_request(request_id="mine", max_tokens=100), timeout=DEADLINE)
            gate.open(2)
            await call.read()
            await stub.Abort(service_pb2.AbortRequest(request_ids=["mine", "nobody's"]), timeout=DEADLINE)
            gate.open(200)
            while (response := await call.read()) is not grpc.aio.EOF:
                last = response.output

            assert last.finish_reason == core_pb2.FINISH_REASON_ABORT


async def test_aborted_handle_gets_no_more_output() -> None:
    gate = Gate()
    with running_server(gate.executor) as server:
        async with server.channel() as channel:
            spy = Spy(server, "abort")
            session = await SessionClient(server.stub(channel)).open()
            await session.add(1, [1], max_tokens=100)
            await session.add(2, [2], max_tokens=20)
            gate.open(3)
            while not session.tokens:
                await session.read()
            await session.abort(1, 77)
            await spy.wait()
            gate.open(200)
            await session.read_until_finished(2)

            assert session.tokens[2] == expected([2], 20)
            assert 1 not in session.finished


async def test_request_id_in_use_is_rejected_and_the_first_request_continues() -> None:
    gate = Gate()
    with running_server(gate.executor) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            session = await SessionClient(stub).open()
            await session.add(1, request_id="same", max_tokens=10)
            gate.open(1)
            while not session.num_outputs:
                await session.read()
            await session.add(2, request_id="same")
            code, details = await code_of(stub.Generate(generate_request(request_id="same"), timeout=DEADLINE))
            gate.open(200)
            await session.read_until_finished(1)

            assert code is grpc.StatusCode.ALREADY_EXISTS
            assert "'same'" in details
            assert session.rejected[2].code == grpc.StatusCode.ALREADY_EXISTS.value[0]
            assert not session.rejected[2].retryable
            assert session.tokens[1] == expected([1, 2, 3], 10)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": []}, "the prompt must hold at least one token"),
        ({"prompt": [61]}, "outside the model's vocabulary of 61 tokens"),
        ({"prompt": [1] * 128}, "maximum context length is 128"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"logprobs": 21}, "logprobs must be at most 20"),
    ],
)
async def test_bad_request_is_rejected_with_a_sentence(stub: Stub, fields: dict[str, Any], sentence: str) -> None:
    code, details = await code_of(stub.Generate(generate_request(**fields), timeout=DEADLINE))
    session = await SessionClient(stub).open()
    await session.add(1, **fields)
    await session.add(2)
    await session.read_until_finished(2)

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in details
    assert sentence in session.rejected[1].message
    assert (session.rejected[1].code, session.rejected[1].retryable) == (3, False)


async def test_rejection_by_a_full_queue_is_retryable() -> None:
    gate = Gate()
    with running_server(gate.executor, max_num_seqs=1, max_waiting_requests=1) as server:
        async with server.channel() as channel:
            spy = Spy(server, "submit")
            session = await SessionClient(server.stub(channel)).open()
            for handle in (1, 2, 3, 4):
                await session.add(handle, [handle], max_tokens=30)
            await spy.wait(4)
            gate.open(1000)
            while not session.rejected:
                await session.read()
            refused = next(iter(session.rejected.values()))

            assert (refused.code, refused.retryable) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], True)


@pytest.mark.parametrize(
    "messages",
    [
        [service_pb2.SessionRequest()],
        [service_pb2.SessionRequest(abort=service_pb2.AbortHandles(handles=[1]))],
        [service_pb2.SessionRequest(open=service_pb2.OpenSession())] * 2,
        [
            service_pb2.SessionRequest(open=service_pb2.OpenSession()),
            service_pb2.SessionRequest(add=service_pb2.AddRequest(handle=0)),
        ],
    ],
)
async def test_session_with_messages_out_of_order_is_closed(
    stub: Stub, messages: list[service_pb2.SessionRequest]
) -> None:
    call = stub.Session(iter(messages), timeout=DEADLINE)

    code, _ = await code_of(call)

    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_model_info_load_and_tokenizer(tmp_path: Path) -> None:
    files = {"tokenizer.json": b"{}", "chat_template.jinja": b"x" * 300_000}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with running_server(tokenizer_folder=tmp_path, served_model_name=("tiny",)) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            info = await stub.GetModelInfo(service_pb2.GetModelInfoRequest(), timeout=DEADLINE)
            received: dict[str, bytes] = {}
            async for part in stub.GetTokenizer(service_pb2.GetTokenizerRequest(), timeout=DEADLINE):
                received[part.file_name] = received.get(part.file_name, b"") + part.data
            load = await stub.GetLoad(service_pb2.GetLoadRequest(), timeout=DEADLINE)

    assert (info.model_name, info.vocab_size, info.num_gpu_blocks, info.block_size) == ("tiny", 61, 64, 4)
    assert info.tokenizer_digest == digest(files)
    assert list(received) == sorted(files)
    assert received == files
    assert load.stats.num_running_reqs == 0


async def test_reflection_names_the_services(server: RunningServer) -> None:
    async with server.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        response = await stub.ServerReflectionInfo(requests, timeout=DEADLINE).read()

    names = {service.name for service in response.list_services_response.service}
    assert {"proa.engine.v1.EngineService", "grpc.health.v1.Health"} <= names


async def test_tokens_do_not_depend_on_other_requests(stub: Stub) -> None:
    prompts = [[index % 61, 3, 5] for index in range(40)]

    together = await asyncio.gather(*(generate(stub, prompt, max_tokens=12) for prompt in prompts))

    assert together == [expected(prompt, 12) for prompt in prompts]


async def test_idle_engine_uses_no_cpu(server: RunningServer) -> None:
    clock = time.pthread_getcpuclockid(server.thread.ident or 0)
    before = time.clock_gettime(clock)
    await asyncio.sleep(0.5)

    assert time.clock_gettime(clock) - before < 0.01


async def test_a_message_larger_than_any_valid_request_is_refused() -> None:
    with running_server(language_model_only=True) as server:
        async with server.channel() as channel:
            huge = generate_request(range(4), request_id="r", max_tokens=1)
            huge.request.prompt_token_ids = bytes(MAX_TEXT_MESSAGE_BYTES)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await anext(aiter(server.stub(channel).Generate(huge, timeout=DEADLINE)))
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await generate(server.stub(channel), range(4), max_tokens=1)
