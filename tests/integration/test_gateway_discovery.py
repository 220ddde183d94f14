"""A gateway with Kubernetes discovery: pods that take over an address, and an API server that is unreachable."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from kubernetes.client import Configuration

from proa.engine.v1 import service_pb2
from proa_gateway import keep_running
from proa_gateway import open_gateway as gateway_module
from proa_gateway.engines import client as breaker
from proa_gateway.engines import deletion_costs
from proa_gateway.engines.client import THRESHOLD, EngineClient
from proa_gateway.engines.discovery import EndpointSliceDiscovery
from support.fake_engine import FakeEngine
from support.fake_kube_api import FakeKubeApi, endpoint
from support.gateway import RunningGateway, running_gateway, until
from support.processes import free_port

RELIST = 1  # seconds; a watch lasts no longer either
OUTAGE = 2.5 * RELIST
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
UNAVAILABLE = service_pb2.Rejected(code=14, message="unavailable", retryable=True)


@pytest.fixture
def api() -> Iterator[FakeKubeApi]:
    with FakeKubeApi() as api:
        yield api


@pytest.fixture
async def engines() -> AsyncIterator[list[FakeEngine]]:
    """Engines at different addresses with one port, as in a Service."""
    port = free_port()
    async with AsyncExitStack() as stack:
        engines = [FakeEngine() for _ in HOSTS]
        for engine, host in zip(engines, HOSTS, strict=True):
            await engine.start(port, host)
            stack.push_async_callback(engine.stop)
        yield engines


@pytest.fixture
async def gateway(
    api: FakeKubeApi, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningGateway]:
    """A gateway that has discovered the first three engines. Breakers stay open for longer than a test takes."""
    configuration = Configuration()
    configuration.host = api.url
    port = int(engines[0].address.rpartition(":")[2])
    discovery = EndpointSliceDiscovery("engine", "proa", port, configuration=configuration, relist_seconds=RELIST)
    monkeypatch.setattr(gateway_module, "make_discovery", lambda config: discovery)
    monkeypatch.setattr(breaker, "FIRST_COOLDOWN", 60.0)
    api.put("slice", *(endpoint(host, pod=f"pod-{host}") for host in HOSTS[:3]))
    async with running_gateway(ready=False, engine_service="engine.proa:50051") as gateway:
        await until(lambda: usable(gateway) == addresses(engines[:3]))
        yield gateway


def addresses(engines: list[FakeEngine]) -> set[str]:
    return {engine.address for engine in engines}


def clients(gateway: RunningGateway) -> dict[str, EngineClient]:
    return {client.address: client for client in gateway.gateway.pool.engines}


def usable(gateway: RunningGateway) -> set[str]:
    return {address for address, client in clients(gateway).items() if client.usable}


async def test_a_new_pod_at_the_same_address_starts_with_a_closed_breaker(
    api: FakeKubeApi, engines: list[FakeEngine], gateway: RunningGateway
) -> None:
    failing, *healthy = engines[:3]
    before = clients(gateway)
    failing.rejection = UNAVAILABLE
    for _ in range(20 * THRESHOLD):
        assert (await gateway.chat(max_tokens=1)).status_code == 200
        if len(failing.requests) == THRESHOLD:
            break
    assert usable(gateway) == addresses(healthy)
    failing.rejection = None
    api.put(
        "slice", endpoint(HOSTS[0], pod="a", uid="new"), *(endpoint(host, pod=f"pod-{host}") for host in HOSTS[1:3])
    )
    await until(lambda: usable(gateway) == addresses([failing, *healthy]))
    after = clients(gateway)
    assert {address for address in after if after[address] is not before[address]} == {failing.address}
    await until(lambda: failing.num_sessions == 1)
    answers = await asyncio.gather(*(gateway.chat(max_tokens=1) for _ in range(12)))
    assert [answer.status_code for answer in answers] == [200] * 12
    assert len(failing.requests) > THRESHOLD


async def test_engines_are_found_after_an_exception(
    api: FakeKubeApi, engines: list[FakeEngine], gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_running, "FIRST_PAUSE", 0.01)
    num_failures = 0

    def fail(addresses: dict[str, str]) -> None:
        nonlocal num_failures
        num_failures += 1
        raise KeyError("name")

    with monkeypatch.context() as broken:
        broken.setattr(gateway.gateway.pool, "set_engines", fail)
        api.put("slice", *(endpoint(host, pod=f"pod-{host}") for host in HOSTS))
        await until(lambda: num_failures >= 2)
        assert usable(gateway) == addresses(engines[:3])
    await until(lambda: usable(gateway) == addresses(engines))


async def test_no_request_fails_while_the_api_server_is_unreachable(
    api: FakeKubeApi, engines: list[FakeEngine], gateway: RunningGateway
) -> None:
    staying, stopped, restarted, added = engines
    loop = asyncio.get_running_loop()
    known, num_calls = set(clients(gateway)), len(api.selectors)
    api.unreachable = True
    api.drop_watches()
    ends_at = loop.time() + OUTAGE
    await asyncio.gather(stopped.stop(), restarted.stop())
    await until(lambda: usable(gateway) == {staying.address})  # their sessions ended
    while loop.time() < ends_at:
        assert (await gateway.chat(max_tokens=1)).status_code == 200
        assert (usable(gateway), set(clients(gateway))) == ({staying.address}, known)
        await asyncio.sleep(0.05)
    assert len(api.selectors) > num_calls + 3  # discovery has kept trying
    await restarted.start(int(staying.address.rpartition(":")[2]), HOSTS[2])
    await until(lambda: usable(gateway) == {staying.address, restarted.address})  # the client reconnects by itself
    api.put("slice", *(endpoint(HOSTS[which], pod=f"pod-{HOSTS[which]}") for which in (0, 2, 3)), notify=False)
    assert set(clients(gateway)) == known
    api.unreachable = False
    there = {staying.address, restarted.address, added.address}
    await until(lambda: usable(gateway) == set(clients(gateway)) == there)
    assert (await gateway.chat(max_tokens=1)).status_code == 200


async def test_pods_are_annotated_with_the_use_of_their_caches(
    api: FakeKubeApi, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = Configuration()
    configuration.host = api.url
    port = int(engines[0].address.rpartition(":")[2])
    discovery = EndpointSliceDiscovery("engine", "proa", port, configuration=configuration)
    monkeypatch.setattr(gateway_module, "make_discovery", lambda config: discovery)
    monkeypatch.setattr(deletion_costs, "PERIOD", 0.1)
    api.put("slice", *(endpoint(host, pod=f"pod-{host}") for host in HOSTS[:2]))

    def costs() -> list[tuple[str, str]]:
        return [(path.rpartition("-")[2], *body["metadata"]["annotations"].values()) for path, body in api.patches]

    async with running_gateway(ready=False, engine_service="engine.proa:50051", pod_deletion_cost=True):
        # The first annotation imports hundreds of modules.
        await until(lambda: sorted(costs()) == [(HOSTS[0], "0"), (HOSTS[1], "0")], seconds=60)
        engines[1].prefix_cache_hits = 1000
        await until(lambda: (HOSTS[1], "10") in costs())
