"""What the chart's release survives under load: lost pods, upgrades, scaling, an API server away, a power cut.

Two tests need a command that no Kubernetes API offers, and are not run without it: PROA_E2E_RESTART_APISERVER, and
PROA_E2E_CUT_POWER, to which the name of a node is appended.
"""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.kube import Release, eventually, run
from support.traffic import Answer, Traffic, traffic

LONG = ("--requests=2", "--question=Count from 1 to 50.", "--max-tokens=400", "--temperature=0.7", "--timeout=120")


@pytest.fixture(scope="module", autouse=True)
def _two_of_each(release: Release) -> None:
    release.install(gateway__replicas="2", engines__builtin__replicas="2")


@contextmanager
def steady_traffic(release: Release, clients: int = 6, node: str | None = None) -> Iterator[Traffic]:
    """Closed-loop traffic during the block and for a while before and after it, none of which may fail."""
    with traffic(release, f"--clients={clients}", node=node) as running:
        running.wait_for(2 * clients)
        yield running
        running.wait_for(2 * clients)
        running.stop()
        assert running.failures() == []


def wait_for_rollouts(release: Release) -> None:
    for name in ("deployment/proa-gateway", "deployment/proa-engine-builtin"):
        release.kubectl("rollout", "status", name, "--timeout=5m")


def texts(answers: list[Answer]) -> dict[tuple[int, int], str]:
    """By client and number of its request, what it was told. None may have failed."""
    assert [answer.error for answer in answers if answer.error] == []
    return {(answer.client, answer.index): answer.text for answer in answers}


def undisturbed(release: Release, clients: int) -> dict[tuple[int, int], str]:
    """What long answers say when nothing happens."""
    with traffic(release, f"--clients={clients}", *LONG) as running:
        running.join(600)
        return texts(running.answers())


def test_every_stream_outlives_its_engine(release: Release) -> None:
    expected = undisturbed(release, 50)
    doomed = release.pods("engine")[0]["metadata"]["name"]
    before = release.generated_tokens(doomed)
    with traffic(release, "--clients=50", *LONG) as running:
        eventually("the engine is generating", lambda: release.generated_tokens(doomed) > before + 500)
        release.kubectl("delete", "pod", doomed, "--grace-period=1", "--wait=false")
        running.join(600)
        assert texts(running.answers()) == expected
    wait_for_rollouts(release)


def test_a_deleted_gateway_fails_no_request(release: Release) -> None:
    doomed = release.pods("gateway")[0]["metadata"]["name"]
    with steady_traffic(release):
        release.kubectl("delete", "pod", doomed, "--timeout=2m")
        wait_for_rollouts(release)


def test_a_killed_gateway_costs_only_the_requests_that_it_held(release: Release) -> None:
    doomed = release.pods("gateway")[0]["metadata"]["name"]
    clients = 6
    with traffic(release, f"--clients={clients}") as running:
        running.wait_for(2 * clients)
        release.kubectl("delete", "pod", doomed, "--grace-period=1", "--wait=false")
        wait_for_rollouts(release)
        running.wait_for(2 * clients)
        assert len(running.failures()) <= clients
        lost = len(running.failures())
        running.wait_for(2 * clients)
        running.stop()
        assert len(running.failures()) == lost


def test_an_upgrade_and_its_rollback_fail_no_request(release: Release) -> None:
    with steady_traffic(release):
        release.install(
            gateway__replicas="2",
            engines__builtin__replicas="2",
            gateway__podAnnotations__turn="second",
            engines__builtin__podAnnotations__turn="second",
        )
        wait_for_rollouts(release)
        run("helm", "rollback", release.name, "--namespace", release.namespace, "--wait", "--timeout=10m", timeout=660)
        wait_for_rollouts(release)


def test_scaling_up_and_down_fails_no_request(release: Release) -> None:
    with steady_traffic(release):
        for replicas in ("1", "3", "1"):
            release.install(gateway__replicas="2", engines__builtin__replicas=replicas)
            wait_for_rollouts(release)
            eventually(
                f"{replicas} engines are left",
                lambda count=int(replicas): len(release.get("pods", release.selector("engine"))["items"]) == count,
            )


def test_no_request_fails_while_the_api_server_is_away(release: Release) -> None:
    command = os.environ.get("PROA_E2E_RESTART_APISERVER")
    if not command:
        pytest.skip("not run: PROA_E2E_RESTART_APISERVER names no command")
    with steady_traffic(release):
        run(*shlex.split(command), timeout=120)


def test_every_stream_outlives_a_worker(release: Release) -> None:
    release.install(
        engines__builtin__replicas="2",
        engines__builtin__tensorParallelSize="2",
        engines__builtin__tensorParallel__mode="sidecar",
    )
    wait_for_rollouts(release)
    expected = undisturbed(release, 20)
    doomed = release.pods("engine")[0]["metadata"]["name"]
    before = release.generated_tokens(doomed)
    with traffic(release, "--clients=20", *LONG) as running:
        eventually("the engine is generating", lambda: release.generated_tokens(doomed) > before + 200)
        release.kill_at_next_work(doomed, "tp-worker-1")
        running.join(600)
        assert texts(running.answers()) == expected
    wait_for_rollouts(release)


def test_a_power_cut_costs_no_stream(release: Release) -> None:
    """The last one: the node does not come back."""
    command = os.environ.get("PROA_E2E_CUT_POWER")
    if not command:
        pytest.skip("not run: PROA_E2E_CUT_POWER names no command")
    safe, doomed = [node["metadata"]["name"] for node in release.get("nodes")["items"]][:2]
    release.install(
        gateway__replicas="1",
        engines__builtin__replicas="2",
        **{"gateway__nodeSelector__kubernetes\\.io/hostname": safe},
    )
    wait_for_rollouts(release)
    nodes = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in release.pods("engine")}
    assert set(nodes) == {safe, doomed}, "the engines are spread over the nodes"
    expected = undisturbed(release, 20)
    before = release.generated_tokens(nodes[doomed])
    with traffic(release, "--clients=20", *LONG, node=safe) as running:
        eventually("the engine is generating", lambda: release.generated_tokens(nodes[doomed]) > before + 200)
        run(*shlex.split(command), doomed, timeout=60)
        running.join(600)
        answers = running.answers()
    assert texts(answers) == expected
    assert longest_silence(answers) < 10


def longest_silence(answers: list[Answer]) -> float:
    """Seconds in which a stream said nothing."""
    return max(answer.silence for answer in answers)
