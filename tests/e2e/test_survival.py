"""Requests under load survive lost pods, upgrades, scaling, an API server that is down, and a power cut.

Two tests need a command, because no Kubernetes API does this, and are skipped without it: PROA_E2E_RESTART_APISERVER,
and PROA_E2E_CUT_POWER, to which the name of a node is appended.
"""

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.kube import Release, eventually, run
from support.traffic import Answer, Texts, Traffic, traffic

DEPLOYMENTS = ("proa-gateway", "proa-engine-builtin")
LONG = ("--requests=2", "--question=Count from 1 to 50.", "--max-tokens=400", "--temperature=0.7", "--timeout=120")


@pytest.fixture(scope="module", autouse=True)
def _two_of_each(release: Release) -> None:
    release.install(gateway__replicas="2", engines__builtin__replicas="2")


@contextmanager
def steady_traffic(release: Release, clients: int = 6, node: str | None = None) -> Iterator[Traffic]:
    """Closed-loop traffic before, during and after the block. Raises AssertionError if a request fails."""
    with traffic(release, f"--clients={clients}", node=node) as running:
        running.wait_for(2 * clients)
        yield running
        running.wait_for(2 * clients)
        running.stop()
        assert running.failures() == []


def undisturbed(release: Release, clients: int) -> Texts:
    """The texts of long responses while nothing else happens."""
    with traffic(release, f"--clients={clients}", *LONG) as running:
        return running.texts()


def test_every_stream_survives_a_deleted_engine(release: Release) -> None:
    expected = undisturbed(release, 50)
    doomed = release.pods("engine")[0]["metadata"]["name"]
    before = release.generated_tokens(doomed)
    with traffic(release, "--clients=50", *LONG) as running:
        eventually("the engine is generating", lambda: release.generated_tokens(doomed) > before + 500)
        release.kubectl("delete", "pod", doomed, "--grace-period=1", "--wait=false")
        assert running.texts() == expected
    release.wait_for_rollout(*DEPLOYMENTS)


def test_a_deleted_gateway_fails_no_request(release: Release) -> None:
    doomed = release.pods("gateway")[0]["metadata"]["name"]
    with steady_traffic(release):
        release.kubectl("delete", "pod", doomed, "--timeout=2m")
        release.wait_for_rollout(*DEPLOYMENTS)


def test_a_killed_gateway_fails_only_its_own_requests(release: Release) -> None:
    doomed = release.pods("gateway")[0]["metadata"]["name"]
    clients = 6
    with traffic(release, f"--clients={clients}") as running:
        running.wait_for(2 * clients)
        release.kubectl("delete", "pod", doomed, "--grace-period=1", "--wait=false")
        release.wait_for_rollout(*DEPLOYMENTS)
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
        release.wait_for_rollout(*DEPLOYMENTS)
        release.rollback()
        release.wait_for_rollout(*DEPLOYMENTS)


def test_scaling_up_and_down_fails_no_request(release: Release) -> None:
    with steady_traffic(release):
        for replicas in ("1", "3", "1"):
            release.install(gateway__replicas="2", engines__builtin__replicas=replicas)
            release.wait_for_rollout(*DEPLOYMENTS)
            eventually(
                f"{replicas} engines are left",
                lambda count=int(replicas): len(release.get("pods", release.selector("engine"))["items"]) == count,
            )


def test_no_request_fails_while_the_api_server_is_down(release: Release) -> None:
    command = os.environ.get("PROA_E2E_RESTART_APISERVER")
    if not command:
        pytest.skip("not run: PROA_E2E_RESTART_APISERVER is not set")
    with steady_traffic(release):
        run(*shlex.split(command), timeout=120)


def test_every_stream_survives_a_killed_worker(release: Release) -> None:
    release.install(
        engines__builtin__replicas="2",
        engines__builtin__tensorParallelSize="2",
        engines__builtin__tensorParallel__mode="sidecar",
    )
    release.wait_for_rollout(*DEPLOYMENTS)
    expected = undisturbed(release, 20)
    doomed = release.pods("engine")[0]["metadata"]["name"]
    before = release.generated_tokens(doomed)
    with traffic(release, "--clients=20", *LONG) as running:
        eventually("the engine is generating", lambda: release.generated_tokens(doomed) > before + 200)
        release.kill_at_next_work(doomed, "tp-worker-1")
        assert running.texts() == expected
    release.wait_for_rollout(*DEPLOYMENTS)


def test_every_stream_survives_a_power_cut(release: Release) -> None:
    """Last in the file: the node stays down."""
    command = os.environ.get("PROA_E2E_CUT_POWER")
    if not command:
        pytest.skip("not run: PROA_E2E_CUT_POWER is not set")
    safe, doomed = [node["metadata"]["name"] for node in release.get("nodes")["items"]][:2]
    one_per_node = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "matchLabelKeys": ["pod-template-hash"],  # pods that the rolling update is about to delete do not count
    }
    release.install(
        gateway__replicas="1",
        engines__builtin__replicas="2",
        engines__builtin__topologySpreadConstraints=[one_per_node],
        **{"gateway__nodeSelector__kubernetes\\.io/hostname": safe},
    )
    release.wait_for_rollout(*DEPLOYMENTS)
    nodes = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in release.pods("engine")}
    assert set(nodes) == {safe, doomed}, "each node runs one engine"
    expected = undisturbed(release, 20)
    before = release.generated_tokens(nodes[doomed])
    with traffic(release, "--clients=20", *LONG, node=safe) as running:
        eventually("the engine is generating", lambda: release.generated_tokens(nodes[doomed]) > before + 200)
        run(*shlex.split(command), doomed, timeout=60)
        assert running.texts() == expected
        assert longest_silence(running.answers()) < 10


def longest_silence(answers: list[Answer]) -> float:
    """The longest time in seconds between two events of a stream."""
    return max(answer.silence for answer in answers)
