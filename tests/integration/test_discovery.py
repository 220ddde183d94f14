"""Discovery against a fake API server with list, watch and the failures of real ones."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from kubernetes.client import Configuration

from proa_gateway.engines.discovery import Endpoint, EndpointSliceDiscovery, StaticDiscovery
from support.fake_kube_api import FakeKubeApi, endpoint

Sets = AsyncIterator[frozenset[Endpoint]]


@pytest.fixture
def api() -> Iterator[FakeKubeApi]:
    with FakeKubeApi() as api:
        yield api


@asynccontextmanager
async def discovering(api: FakeKubeApi, *, relist_seconds: int = 60) -> AsyncIterator[Sets]:
    configuration = Configuration()
    configuration.host = api.url
    discovery = EndpointSliceDiscovery(
        "engine", "proa", 50051, configuration=configuration, relist_seconds=relist_seconds
    )
    endpoints = discovery.endpoints()
    try:
        yield endpoints
    finally:
        async with asyncio.timeout(5):
            await discovery.close()


async def following(sets: Sets) -> frozenset[Endpoint]:
    async with asyncio.timeout(15):
        return await anext(sets)


async def until(sets: Sets, addresses: set[str]) -> frozenset[Endpoint]:
    """Wait for the first set with these addresses."""
    async with asyncio.timeout(15):
        async for endpoints in sets:
            if {item.address for item in endpoints} == addresses:
                return endpoints
    raise AssertionError("discovery ended")


async def becomes_true(condition: Callable[[], bool]) -> None:
    """Poll, because the condition is set by a thread."""
    async with asyncio.timeout(15):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def watching(api: FakeKubeApi, count: int = 1) -> None:
    await becomes_true(lambda: api.watches >= count and api.num_watchers > 0)


async def test_static_addresses_are_yielded_once() -> None:
    sets = StaticDiscovery(["a:1", "b:2"]).endpoints()
    assert {item.address for item in await anext(sets)} == {"a:1", "b:2"}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(sets), 0.05)


async def test_the_first_set_is_the_list_of_the_services_endpoints(api: FakeKubeApi) -> None:
    api.put("engine-a", endpoint("10.0.0.1", pod="engine-0"), endpoint("10.0.0.2", pod="engine-1"))
    async with discovering(api) as sets:
        assert {item.address for item in await following(sets)} == {"10.0.0.1:50051", "10.0.0.2:50051"}
    assert set(api.selectors) == {"kubernetes.io/service-name=engine"}


async def test_changes_arrive_through_the_watch_without_another_list(api: FakeKubeApi) -> None:
    async with discovering(api) as sets:
        assert await following(sets) == frozenset()
        await watching(api)
        api.put("engine-a", endpoint("10.0.0.1", pod="engine-0"))
        await until(sets, {"10.0.0.1:50051"})
        api.put("engine-b", endpoint("10.0.0.2", pod="engine-1"))
        await until(sets, {"10.0.0.1:50051", "10.0.0.2:50051"})
        api.delete("engine-a")
        await until(sets, {"10.0.0.2:50051"})
    assert api.lists == 1


async def test_unready_endpoints_are_included_and_terminating_ones_marked(api: FakeKubeApi) -> None:
    api.put(
        "engine-a",
        endpoint("10.0.0.1", pod="ready", ready=True, serving=True),
        endpoint("10.0.0.2", pod="loading", ready=True, serving=False),
        endpoint("10.0.0.3", pod="terminating", ready=True, serving=True, terminating=True),
        endpoint("10.0.0.4", pod="unknown", ready=None),
    )
    async with discovering(api) as sets:
        found = {item.uid.removeprefix("uid-of-"): item.terminating for item in await following(sets)}
    assert found == {"ready": False, "loading": False, "terminating": True, "unknown": False}


async def test_a_replaced_pod_is_another_endpoint(api: FakeKubeApi) -> None:
    api.put("engine-a", endpoint("10.0.0.1", pod="engine-0", uid="first"))
    async with discovering(api) as sets:
        before = await following(sets)
        await watching(api)
        api.put("engine-a", endpoint("10.0.0.1", pod="engine-0", uid="second"))
        after = await following(sets)
    assert {item.address for item in before} == {item.address for item in after}
    assert before.isdisjoint(after)


async def test_a_pod_in_two_slices_is_one_endpoint_and_terminating_if_either_says_so(api: FakeKubeApi) -> None:
    api.put("engine-v6", endpoint("fd00::1", pod="engine-0", terminating=True))
    api.put("engine-v4", endpoint("10.0.0.1", pod="engine-0"))
    async with discovering(api) as sets:
        (only,) = await following(sets)
    assert (only.address, only.terminating) == ("10.0.0.1:50051", True)


async def test_an_ipv6_address_is_bracketed(api: FakeKubeApi) -> None:
    api.put("engine-v6", endpoint("fd00::1", pod="engine-0"))
    async with discovering(api) as sets:
        assert {item.address for item in await following(sets)} == {"[fd00::1]:50051"}


async def test_a_deletion_missed_by_the_watch_is_found_by_the_next_list(api: FakeKubeApi) -> None:
    api.put("engine-a", endpoint("10.0.0.1", pod="engine-0"))
    api.put("engine-b", endpoint("10.0.0.2", pod="engine-1"))
    async with discovering(api) as sets:
        await until(sets, {"10.0.0.1:50051", "10.0.0.2:50051"})
        await watching(api)
        api.delete("engine-a", notify=False)
        api.drop_watches()
        await until(sets, {"10.0.0.2:50051"})


async def test_410_gone_leads_to_another_list(api: FakeKubeApi) -> None:
    api.gone_next_watch = True
    async with discovering(api) as sets:
        assert await following(sets) == frozenset()
        await watching(api, 2)
        api.put("engine-a", endpoint("10.0.0.1", pod="engine-0"))
        await until(sets, {"10.0.0.1:50051"})
    assert api.lists >= 2


async def test_a_lost_event_is_found_by_the_periodic_list(api: FakeKubeApi) -> None:
    async with discovering(api, relist_seconds=1) as sets:
        assert await following(sets) == frozenset()
        await watching(api)
        api.put("engine-a", endpoint("10.0.0.1", pod="engine-0"), notify=False)
        await until(sets, {"10.0.0.1:50051"})


async def test_the_last_set_stays_while_the_api_server_fails(api: FakeKubeApi) -> None:
    api.put("engine-a", endpoint("10.0.0.1", pod="engine-0"))
    async with discovering(api) as sets:
        await until(sets, {"10.0.0.1:50051"})
        await watching(api)
        api.broken = True
        api.drop_watches()
        upcoming = asyncio.ensure_future(anext(sets))
        await becomes_true(lambda: len(api.selectors) >= 4)  # it keeps trying
        assert not upcoming.done()
        api.put("engine-b", endpoint("10.0.0.2", pod="engine-1"), notify=False)
        api.broken = False
        async with asyncio.timeout(15):
            assert {item.address for item in await upcoming} == {"10.0.0.1:50051", "10.0.0.2:50051"}


async def test_a_slow_api_server_does_not_block_the_event_loop(api: FakeKubeApi) -> None:
    loop = asyncio.get_running_loop()
    api.put("engine-a", endpoint("10.0.0.1", pod="engine-0"))
    api.answering.clear()
    async with discovering(api) as sets:
        upcoming = asyncio.ensure_future(anext(sets))
        longest, before = 0.0, loop.time()
        async with asyncio.timeout(15):
            while not api.selectors:
                await asyncio.sleep(0.001)
                longest, before = max(longest, loop.time() - before), loop.time()
        assert not upcoming.done()
        assert longest < 1.0
        api.answering.set()
        async with asyncio.timeout(15):
            assert {item.address for item in await upcoming} == {"10.0.0.1:50051"}


@asynccontextmanager
async def annotating(api: FakeKubeApi) -> AsyncIterator[EndpointSliceDiscovery]:
    configuration = Configuration()
    configuration.host = api.url
    discovery = EndpointSliceDiscovery("engine", "proa", 50051, configuration=configuration)
    try:
        await following(discovery.endpoints())
        yield discovery
    finally:
        await discovery.close()


def written(api: FakeKubeApi) -> dict[str, str]:
    """The deletion cost of each pod, as written last."""
    name = "controller.kubernetes.io/pod-deletion-cost"
    return {path: body["metadata"]["annotations"][name] for path, body in api.patches}


async def test_deletion_costs_are_written_to_the_pods_where_they_change(api: FakeKubeApi) -> None:
    api.put("engine-a", *(endpoint(f"10.0.0.{number}", pod=f"engine-{number}") for number in range(3)))
    async with annotating(api) as discovery:
        costs = {"uid-of-engine-0": 3, "uid-of-engine-1": 7, "uid-of-another": 1}
        await discovery.set_deletion_costs(costs)
        pods = "/api/v1/namespaces/proa/pods"
        assert written(api) == {f"{pods}/engine-0": "3", f"{pods}/engine-1": "7"}
        await discovery.set_deletion_costs(costs)
        assert len(api.patches) == 2
        await discovery.set_deletion_costs({**costs, "uid-of-engine-1": 0})
        assert api.patches[2:] == [(f"{pods}/engine-1", api.patches[2][1])]
        assert written(api)[f"{pods}/engine-1"] == "0"


async def test_a_cost_that_was_not_written_is_written_later(api: FakeKubeApi) -> None:
    api.put("engine-a", endpoint("10.0.0.1", pod="engine-1"))
    async with annotating(api) as discovery:
        api.patch_status = 500
        await discovery.set_deletion_costs({"uid-of-engine-1": 5})
        api.patch_status = 200
        num_before = len(api.patches)
        await discovery.set_deletion_costs({"uid-of-engine-1": 5})
        assert len(api.patches) == num_before + 1


async def test_a_gateway_that_may_not_patch_pods_says_so_once(
    api: FakeKubeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.put("engine-a", *(endpoint(f"10.0.0.{number}", pod=f"engine-{number}") for number in range(3)))
    async with annotating(api) as discovery:
        api.patch_status = 403
        for number in range(3):
            await discovery.set_deletion_costs({f"uid-of-engine-{pod}": number for pod in range(3)})
    assert len(api.patches) == 1
    assert [record.message for record in caplog.records if "may not patch pods" in record.message]
    assert len(caplog.records) == 1


async def test_the_costs_of_many_pods_are_written_in_several_calls(api: FakeKubeApi) -> None:
    api.put("engine-a", *(endpoint(f"10.0.0.{number}", pod=f"engine-{number}") for number in range(30)))
    costs = {f"uid-of-engine-{number}": 1 for number in range(30)}
    async with annotating(api) as discovery:
        await discovery.set_deletion_costs(costs)
        assert len(api.patches) == 20
        await discovery.set_deletion_costs(costs)
        assert len(written(api)) == 30
