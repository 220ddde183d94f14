"""KEDA's external scaler of gateways, called as KEDA does; over real sockets."""

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from proa.options import add_options
from proa_gateway.config import Deadlines
from proa_gateway.scaler import peers
from proa_gateway.scaler.config import ScalerOptions
from proa_gateway.scaler.demand import Demand
from proa_gateway.scaler.server import ScalerPortInUse, serve_scaler
from proa_gateway.scaler.v1 import externalscaler_pb2 as keda
from proa_gateway.scaler.v1 import externalscaler_pb2_grpc
from support.cable import Cable
from support.fake_engine import FakeEngine, say
from support.gateway import PATIENT, RunningGateway, running_gateway, until
from support.processes import free_port

HOLDING = Deadlines(connect=10.0, heartbeat=10.0, shutdown=5.0, scale_from_zero=30.0)


@asynccontextmanager
async def scaled_gateway(
    *engines: FakeEngine, port: int, peers: Sequence[int] = (), deadlines: Deadlines = PATIENT
) -> AsyncIterator[tuple[RunningGateway, externalscaler_pb2_grpc.ExternalScalerStub]]:
    """A gateway that knows the model `fake`, and KEDA's client of it."""
    options = ScalerOptions(scaler_port=port, scaler_peers=tuple(f"localhost:{peer}" for peer in peers))
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        running_gateway(*engines, deadlines=deadlines, scaler=options, models=("fake",)) as gateway,
    ):
        yield gateway, externalscaler_pb2_grpc.ExternalScalerStub(channel)


def ref(**metadata: str) -> keda.ScaledObjectRef:
    return keda.ScaledObjectRef(name="pool", namespace="default", scalerMetadata={"model": "fake", **metadata})


async def value(scaler: Any, **metadata: str) -> float:
    answer = await scaler.GetMetrics(keda.GetMetricsRequest(scaledObjectRef=ref(**metadata), metricName="requests"))
    (metric,) = answer.metricValues
    assert metric.metricName == "requests"
    return float(metric.metricValueFloat)


async def until_value(scaler: Any, holds: Callable[[float], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds(await value(scaler)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def ask(gateway: RunningGateway, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(gateway.complete([1, 2, 3])) for _ in range(count)]


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_running_and_waiting_requests_are_the_metric() -> None:
    async with (
        FakeEngine(script=say("one two"), step_delay=None, max_num_seqs=8) as engine,
        scaled_gateway(engine, port=free_port()) as (gateway, scaler),
    ):
        assert await value(scaler) == 0
        assert not (await scaler.IsActive(ref())).result
        tasks = ask(gateway, 20)  # nine are sent to the engine
        await until_value(scaler, lambda found: found == 20)
        assert (await scaler.IsActive(ref())).result
        assert await value(scaler, role="prefill") == 0
        engine.step_delay = 0.0
        assert [(await task).status_code for task in tasks] == [200] * 20
        await until_value(scaler, lambda found: found == 0)


async def test_the_target_of_the_trigger_is_that_of_the_metric() -> None:
    async with scaled_gateway(port=free_port()) as (_, scaler):
        (spec,) = (await scaler.GetMetricSpec(ref(target="2.5"))).metricSpecs
        assert (spec.metricName, spec.targetSizeFloat) == ("requests", 2.5)


async def test_a_trigger_without_a_model_is_an_invalid_argument() -> None:
    async with scaled_gateway(port=free_port()) as (_, scaler):
        with pytest.raises(grpc.aio.AioRpcError, match="needs the name of the model") as caught:
            await scaler.IsActive(keda.ScaledObjectRef(name="pool"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_held_request_is_pushed_and_the_stream_ends_well_with_the_gateway() -> None:
    async with scaled_gateway(port=free_port(), deadlines=HOLDING) as (gateway, scaler):
        stream = scaler.StreamIsActive(ref())
        assert [message.result async for message in _first(stream, 1)] == [False]
        tasks = ask(gateway, 1)
        assert [message.result async for message in _first(stream, 1)] == [True]
        await cancel(tasks)
        assert [message.result async for message in _first(stream, 1)] == [False]
        ended = asyncio.create_task(stream.code())
    assert await ended is grpc.StatusCode.OK


async def test_every_gateway_counts_what_waits_in_all() -> None:
    ports = [free_port() for _ in range(2)]
    async with (
        scaled_gateway(port=ports[0], peers=ports, deadlines=HOLDING) as (first, asked),
        scaled_gateway(port=ports[1], peers=ports, deadlines=HOLDING) as (second, _),
    ):
        stream = asked.StreamIsActive(ref())
        assert [message.result async for message in _first(stream, 1)] == [False]
        tasks = ask(second, 2)
        assert [message.result async for message in _first(stream, 1)] == [True]
        tasks += ask(first, 3)
        await until_value(asked, lambda found: found == 5)
        page = (await first.http.get("/metrics")).text
        assert "proa_gateway_scaler_peers 1.0" in page
        await cancel(tasks)
        await until_value(asked, lambda found: found == 0)
        stream.cancel()


async def test_a_port_that_another_gateway_has_is_refused() -> None:
    options = ScalerOptions(scaler_port=free_port())
    async with serve_scaler(options, "127.0.0.1", "first", Demand([])):
        with pytest.raises(ScalerPortInUse, match=r"cannot listen on 127\.0\.0\.1:[0-9]+ \(--scaler-port\)"):
            async with serve_scaler(options, "127.0.0.1", "second", Demand([])):
                pass


async def test_a_gateway_whose_node_lost_power_is_not_counted_however_long_nothing_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {name: 300 for name, milliseconds in peers.CHANNEL_OPTIONS if name.endswith("_ms") and milliseconds}
    monkeypatch.setattr(peers, "CHANNEL_OPTIONS", tuple((dict(peers.CHANNEL_OPTIONS) | times).items()))
    lost, demand = Demand([]), Demand([])
    lost.set_waiting("fake", 3)
    port = free_port()
    async with (
        serve_scaler(ScalerOptions(scaler_port=port), "127.0.0.1", "lost", lost),
        Cable(f"127.0.0.1:{port}") as cable,
        serve_scaler(ScalerOptions(scaler_port=free_port(), scaler_peers=(cable.address,)), "127.0.0.1", "own", demand),
    ):
        await until(lambda: demand.of("fake", prefill=False) == 3, 30)
        await asyncio.sleep(1.5)  # gRPC sends two pings without messages by default
        cable.cut()
        await until(lambda: demand.of("fake", prefill=False) == 0, 30)


async def test_gateways_stay_counted_while_no_name_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[int] = []  # of name servers, the last one now

    def resolve(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        lookups.append(host)
        if errors:
            raise socket.gaierror(errors[-1], "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    lookups: list[str] = []
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(peers, "RESOLVE_INTERVAL", 0.02)
    other, demand = Demand([]), Demand([])
    other.set_waiting("fake", 3)
    port = free_port()
    options = ScalerOptions(scaler_port=free_port(), scaler_peers=(f"gateways:{port}",))
    async with (
        serve_scaler(ScalerOptions(scaler_port=port), "127.0.0.1", "other", other),
        serve_scaler(options, "127.0.0.1", "own", demand),
    ):
        await until(lambda: demand.num_gateways == 1, 30)
        errors.append(socket.EAI_AGAIN)
        lookups.clear()
        await until(lambda: len(lookups) > 3, 30)
        assert demand.of("fake", prefill=False) == 3
        errors.append(socket.EAI_NONAME)
        await until(lambda: demand.num_gateways == 0, 30)


@pytest.mark.parametrize("peer", ["gateway", "http://gateway:80", "gateway:0", "gateway:65536", "gateway..svc:80"])
def test_a_peer_whose_addresses_can_never_be_found_is_refused(peer: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, ScalerOptions)
    with pytest.raises(argparse.ArgumentError):
        parser.parse_args(["--scaler-peers", peer])


async def _first(stream: Any, count: int) -> AsyncIterator[Any]:
    async with asyncio.timeout(30):
        for _ in range(count):
            yield await stream.read()
