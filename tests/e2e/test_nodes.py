"""Engines over several pods: LeaderWorkerSets on two nodes, whose pods connect with mutual TLS.

Skipped if the cluster has no LeaderWorkerSets and `scripts/lws` has not compiled their controller. Not a smoke test.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from support.certificates import signed
from support.kube import Release, eventually
from support.leader_worker_sets import controller
from support.traffic import Texts, traffic

ON_TWO_NODES = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
NODES = {"nodes": 2, "drainSeconds": 2, "topologySpreadConstraints": [ON_TWO_NODES]}
WIDE = {**NODES, "tensorParallelSize": 2, "replicas": 2}
DEEP = {**NODES, "pipelineParallelSize": 2}
LONG = (
    *("--clients=20", "--requests=2", "--question=Count from 1 to 50.", "--max-tokens=400", "--temperature=0.7"),
    "--timeout=180",
)
GROUP = "leaderworkerset.sigs.k8s.io/group-index"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 29501), 3).close(); print('connected')"
# The command line of this program contains the word as well, but not as an argument of its own.
KILL_RANKS = """
import os, pathlib, signal
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    if b"node-worker" in file.read_bytes().split(b"\\0"):
        os.kill(int(file.parent.name), signal.SIGKILL)
        print("killed")
"""


@dataclass(frozen=True, slots=True)
class InOnePod:
    """What engines of one pod generate. Sums over two ranks round differently from those of one."""

    one_rank: Texts
    two_ranks: Texts


@pytest.fixture(scope="module")
def _leader_worker_sets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with controller(tmp_path_factory.mktemp("lws")):
        yield


@pytest.fixture(scope="module")
def in_one_pod(_leader_worker_sets: None, release: Release) -> InOnePod:
    one_rank = answered(release)
    release.install(engines__builtin__tensorParallelSize="2")
    return InOnePod(one_rank, two_ranks=answered(release))


@pytest.fixture(scope="module", autouse=True)
def _groups(in_one_pod: InOnePod, release: Release, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A pool of two engines, each with one rank in each of two pods."""
    made = signed(tmp_path_factory.mktemp("certificates") / "tls")
    files = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": made.authority}
    release.kubectl(
        "create", "secret", "generic", "tls", *(f"--from-file={name}={path}" for name, path in files.items())
    )
    release.install(engines={"wide": WIDE}, tls__existingSecret="tls")
    release.wait_for_groups("proa-engine-wide")


def answered(release: Release) -> Texts:
    with traffic(release, *LONG) as running:
        return running.texts()


def group(release: Release, index: int) -> tuple[Any, Any]:
    """The leader pod and the worker pod of a group."""
    pods = [*release.pods("engine"), *release.pods("engine-worker")]
    leader, worker = (pod for pod in pods if pod["metadata"]["labels"].get(GROUP) == str(index))
    return leader, worker


def test_the_pods_of_an_engine_are_on_two_nodes(release: Release) -> None:
    for index in (0, 1):
        leader, worker = group(release, index)
        assert leader["spec"]["nodeName"] != worker["spec"]["nodeName"]


def test_gateways_find_leaders_only(release: Release) -> None:
    slices = release.get("endpointslices", "--selector=kubernetes.io/service-name=proa-engine")["items"]
    addresses = {address for each in slices for endpoint in each["endpoints"] for address in endpoint["addresses"]}
    assert addresses == {pod["status"]["podIP"] for pod in release.pods("engine")}
    assert not addresses & {pod["status"]["podIP"] for pod in release.pods("engine-worker")}


def test_other_pods_cannot_connect_as_a_node(release: Release) -> None:
    leader, worker = group(release, 0)
    (gateway,) = release.pods("gateway")

    def can_connect(pod: Any) -> bool:
        command = ("exec", pod["metadata"]["name"], "--", "python3", "-c", CONNECT, leader["status"]["podIP"])
        return "connected" in release.kubectl(*command, check=False)

    assert can_connect(worker)
    assert not can_connect(gateway)


def test_two_pods_generate_the_tokens_of_one(release: Release, in_one_pod: InOnePod) -> None:
    assert answered(release) == in_one_pod.two_ranks
    for index in (0, 1):
        assert release.generated_tokens(group(release, index)[0]["metadata"]["name"]) > 0


def kill_ranks(release: Release, pod: str) -> None:
    assert "killed" in release.kubectl("exec", pod, "--container=engine", "--", "python3", "-c", KILL_RANKS)


def delete_now(release: Release, pod: str) -> None:
    release.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")


def drain(release: Release, pod: str) -> None:
    release.kubectl("delete", "pod", pod, "--wait=false")


@pytest.mark.parametrize("lose", [kill_ranks, delete_now, drain])
def test_every_stream_survives_a_lost_worker_pod(
    release: Release, in_one_pod: InOnePod, lose: Callable[[Release, str], None]
) -> None:
    leader, worker = group(release, 0)
    name, uid = leader["metadata"]["name"], leader["metadata"]["uid"]
    before = release.generated_tokens(name)
    with traffic(release, *LONG) as running:
        eventually("the engine is generating", lambda: release.generated_tokens(name) > before + 200)
        lose(release, worker["metadata"]["name"])
        assert running.texts() == in_one_pod.two_ranks

    def recreated() -> bool:
        """Whether the group has a new leader."""
        return any(pod["metadata"]["name"] == name and pod["metadata"]["uid"] != uid for pod in release.pods("engine"))

    eventually("the group is recreated", recreated)
    release.wait_for_pod(name)
    with traffic(release, *LONG) as running:
        eventually("the new engine is generating", lambda: release.generated_tokens(name) > 200)
        assert running.texts() == in_one_pod.two_ranks


def test_an_upgrade_fails_no_request(release: Release) -> None:
    def upgraded() -> bool:
        leaders = release.pods("engine")
        turns = [leader["metadata"].get("annotations", {}).get("turn") for leader in leaders]
        return turns == ["second"] * 2 and all(is_ready(leader) for leader in leaders)

    with traffic(release, "--clients=6") as running:
        running.wait_for(12)
        release.upgrade(engines={"wide": {**WIDE, "podAnnotations": {"turn": "second"}}}, tls__existingSecret="tls")
        eventually("the groups are replaced", upgraded, seconds=300)
        running.wait_for(12)
        running.stop()
        assert running.failures() == []


def is_ready(pod: Any) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"]["conditions"])


def test_pipeline_stages_in_two_pods_generate_the_tokens_of_one(release: Release, in_one_pod: InOnePod) -> None:
    release.install(engines={"deep": DEEP}, tls__existingSecret="tls")
    release.wait_for_groups("proa-engine-deep")
    eventually("the other pool is gone", lambda: len(release.pods("engine")) == 1)
    assert answered(release) == in_one_pod.one_rank
