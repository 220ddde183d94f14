"""Shutdown of the engine server: on a signal, after a failure, or during a hung step. Health changes first."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proa.contract import SamplingParams
from proa.engine.v1 import service_pb2
from proa_engine.server import shutdown, watchdog
from support.engine_client import DEADLINE, SessionClient, generate_request, wait_until
from support.engine_server import LoadedFakeExecutor, RunningServer, running_server, wait_for_health
from support.fake_executor import generate as expected_tokens
from support.processes import free_port

SERVICE = "proa.engine.v1.EngineService"


class Timeline:
    """Health changes and other events in the order in which a client sees them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.seen: list[str] = []
        self._stub = health_pb2_grpc.HealthStub(channel)

    async def watch(self, service: str) -> None:
        watching = self._stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
        async for response in watching:
            self.seen.append(f"{service} {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}")

    async def until(self, word: str) -> None:
        await wait_until(lambda: word in self.seen)


@asynccontextmanager
async def watched(server: RunningServer, *services: str) -> AsyncIterator[Timeline]:
    """Watch the health of services, after each has been SERVING."""
    async with server.channel() as channel:
        timeline = Timeline(channel)
        tasks = [asyncio.create_task(timeline.watch(service)) for service in services]
        try:
            for service in services:
                await timeline.until(f"{service} SERVING")
            yield timeline
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Hang:
    """A device whose step hangs until `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.executor = LoadedFakeExecutor(while_waiting=self._wait)

    def _wait(self) -> None:
        self.release.wait(DEADLINE)


async def until_ended(session: SessionClient) -> tuple[grpc.StatusCode, str]:
    with suppress(grpc.aio.AioRpcError):
        while await session.read():
            pass
    return await session.call.code(), await session.call.details()


async def test_drain_finishes_running_requests_and_rejects_new_ones() -> None:
    hang = Hang()
    with running_server(hang.executor) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            session = await SessionClient(stub).open()
            async with watched(server, SERVICE) as timeline:
                await session.add(1, [9, 8], max_tokens=30)
                await wait_until(lambda: hang.executor.plans)
                server.server.request_stop()
                await timeline.until(f"{SERVICE} NOT_SERVING")
            while not session.draining:
                await session.read()
            await session.add(2)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(generate_request(), timeout=DEADLINE).read()
            hang.release.set()
            while await session.read():
                pass
        server.thread.join(DEADLINE)

        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (session.rejected[2].code, session.rejected[2].retryable) == (14, True)
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        assert session.tokens[1] == expected_tokens([9, 8], params, frozenset(), 128)
        assert (server.result, server.exits) == ([0], [])
        assert hang.executor.is_shut_down


async def test_request_that_outlasts_the_drain_timeout_fails() -> None:
    hang = Hang()
    with running_server(hang.executor, drain_timeout=0.2) as server:
        async with server.channel() as channel:
            session = await SessionClient(server.stub(channel)).open()
            await session.add(1, max_tokens=100)
            await wait_until(lambda: hang.executor.plans)
            server.server.request_stop()
            code, details = await until_ended(session)
            hang.release.set()
        server.thread.join(DEADLINE)

        assert code is grpc.StatusCode.UNAVAILABLE
        assert "shut down before" in details
        assert server.result == [0]


async def test_drained_process_exits_although_its_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "EXIT_SECONDS", 0.1)
    hang = Hang()
    with running_server(hang.executor, drain_timeout=0.1) as server:
        async with server.channel() as channel:
            session = await SessionClient(server.stub(channel)).open()
            await session.add(1, max_tokens=100)
            await wait_until(lambda: hang.executor.plans)
            server.server.request_stop()
            await wait_until(lambda: server.exits)
        hang.release.set()

        assert server.exits == [1]


async def test_idle_server_exits_at_once() -> None:
    with running_server() as server:
        started = time.monotonic()
        server.server.request_stop()
        server.thread.join(DEADLINE)

        assert server.result == [0]
        assert time.monotonic() - started < 20  # not after the drain's 30 s


async def test_failed_step_fails_the_sessions_with_its_error() -> None:
    executor = LoadedFakeExecutor(fail_at=3)
    with running_server(executor) as server:
        async with server.channel() as channel:
            session = await SessionClient(server.stub(channel)).open()
            async with watched(server, SERVICE, "liveness") as timeline:
                await session.add(1, max_tokens=30)
                code, details = await until_ended(session)
                timeline.seen.append("session ended")
                await timeline.until("liveness NOT_SERVING")
        server.thread.join(DEADLINE)

        assert code is grpc.StatusCode.UNAVAILABLE
        assert "step 3 failed" in details
        assert timeline.seen.index(f"{SERVICE} NOT_SERVING") < timeline.seen.index("session ended")
        assert server.exits == [1]


async def test_executor_failure_while_idle_ends_the_engine() -> None:
    executor = LoadedFakeExecutor()
    with running_server(executor) as server:
        async with server.channel() as channel:
            session = await SessionClient(server.stub(channel)).open()
            executor.fail("rank 1 (process 7) was killed by signal 9")
            code, details = await until_ended(session)

        assert code is grpc.StatusCode.UNAVAILABLE
        assert "rank 1 (process 7) was killed by signal 9" in details


async def test_late_step_is_not_serving_until_it_ends() -> None:
    hang = Hang()
    with running_server(hang.executor, step_timeout=0.3) as server:
        async with server.channel() as channel:
            session = await SessionClient(server.stub(channel)).open()
            async with watched(server, SERVICE, "liveness") as timeline:
                await session.add(1, max_tokens=3)
                await timeline.until(f"{SERVICE} NOT_SERVING")
                while session.stats is None or session.stats.last_step_age < 0.3:
                    await session.read()
                hang.release.set()
                await session.read_until_finished(1)
                await wait_until(lambda: timeline.seen[-1] == f"{SERVICE} SERVING")

            assert "liveness NOT_SERVING" not in timeline.seen
            assert server.exits == []


async def test_probes_at_the_health_port_see_a_late_step() -> None:
    hang = Hang()
    health_port = free_port()
    with running_server(hang.executor, step_timeout=0.3, health_port=health_port) as server:
        async with server.channel() as channel, grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as probes:
            stub = health_pb2_grpc.HealthStub(probes)

            async def probe(service: str) -> bool:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

            async def until_ready(expected: bool) -> None:
                async with asyncio.timeout(DEADLINE):
                    while await probe("") is not expected:  # noqa: ASYNC110 - as the kubelet does
                        await asyncio.sleep(0.02)

            session = await SessionClient(server.stub(channel)).open()
            await until_ready(True)
            await session.add(1, max_tokens=3)
            await until_ready(False)
            assert (await probe("liveness"), await probe("startup")) == (True, True)
            hang.release.set()
            await session.read_until_finished(1)
            await until_ready(True)


async def test_idle_connections_do_not_take_the_health_port_away() -> None:
    health_port = free_port()
    with running_server(health_port=health_port), ExitStack() as stack:
        for begun in (b"", b"PRI * HTTP/2.0\r\n") * 32:
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", health_port), timeout=30))
            idle.sendall(begun)
        for _ in range(25):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
                request = health_pb2.HealthCheckRequest(service="liveness")
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_hung_collective_ends_the_engine_when_its_step_is_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.5)
    hang = Hang()
    with running_server(hang.executor, step_timeout=0.3, tensor_parallel_size=2) as server:
        async with server.channel() as channel:
            session = await SessionClient(server.stub(channel)).open()
            async with watched(server, SERVICE) as timeline:
                await session.add(1, max_tokens=3)
                code, details = await until_ended(session)
                timeline.seen.append("session ended")
        await wait_until(lambda: server.exits)
        hang.release.set()

        assert code is grpc.StatusCode.UNAVAILABLE
        assert "a step has been running for" in details
        assert "one of the ranks 0 to 1 hangs" in details
        assert timeline.seen == [f"{SERVICE} SERVING", f"{SERVICE} NOT_SERVING", "session ended"]
        assert server.exits == [1]
        assert hang.executor.failure is not None


async def test_requests_are_rejected_before_the_model_is_loaded() -> None:
    release = threading.Event()
    with running_server(before_load=lambda: release.wait(DEADLINE), wait_until_loaded=False) as server:
        async with server.channel() as channel:
            stub = server.stub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(generate_request(), timeout=DEADLINE).read()
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await stub.GetModelInfo(service_pb2.GetModelInfoRequest(), timeout=DEADLINE)
            health = health_pb2_grpc.HealthStub(channel)
            statuses = {
                service: (await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)).status
                for service in ("", SERVICE, "startup", "liveness")
            }
            release.set()
            await asyncio.to_thread(wait_for_health, server.port, "startup")

    assert (refused.value.code(), unknown.value.code()) == (grpc.StatusCode.UNAVAILABLE,) * 2
    assert "still loading" in (refused.value.details() or "")
    assert statuses == {"": 2, SERVICE: 2, "startup": 2, "liveness": 1}


async def test_engine_is_ready_when_a_gateway_has_opened_a_session() -> None:
    with running_server() as server:
        async with server.channel() as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            before = (await health.Check(request, timeout=DEADLINE)).status
            await SessionClient(server.stub(channel)).open()
            await asyncio.to_thread(wait_for_health, server.port, SERVICE)

    assert before == health_pb2.HealthCheckResponse.NOT_SERVING
