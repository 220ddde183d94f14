"""GPUs by dynamic resource allocation: one claim shared by all containers of a pod.

Skipped if the cluster has no DeviceClass gpu.nvidia.com. The driver may simulate GPUs: the engine computes on the CPU;
the test checks that the claim is allocated, shared by engine and worker, and released.
"""

from typing import Any

import pytest

from support.kube import Release, eventually, run

# Those of a GPU pool are two cores and 8 GiB a rank. Here nothing is computed on GPUs, and a node may have two cores.
REQUESTS = {"cpu": "250m", "memory": "1Gi"}
CLAIM = "cannot allocate all claims"  # the scheduler's words


@pytest.fixture(scope="module", autouse=True)
def _gpus() -> None:
    if not run("kubectl", "get", "deviceclass", "gpu.nvidia.com", "--output=name", check=False):
        pytest.skip("not run: the cluster has no DeviceClass gpu.nvidia.com")


def test_engine_and_sidecar_share_one_claim(release: Release) -> None:
    release.install(
        engines__builtin__gpu__allocation="dra",
        engines__builtin__resources__requests=REQUESTS,
        engines__builtin__tensorParallelSize="2",
        engines__builtin__tensorParallel__mode="sidecar",
        **{"engines__builtin__extraArgs[0]": "--device=cpu"},
    )
    (pod,) = release.pods("engine")
    containers = pod["spec"]["initContainers"] + pod["spec"]["containers"]
    assert [container["name"] for container in containers] == ["tp-worker-1", "engine"]
    (name,) = {claim["name"] for container in containers for claim in container["resources"]["claims"]}
    (status,) = pod["status"]["resourceClaimStatuses"]
    assert status["name"] == name
    claim = release.get("resourceclaim", status["resourceClaimName"])["status"]
    assert len(claim["allocation"]["devices"]["results"]) == 2
    run("helm", "test", release.name, "--namespace", release.namespace, "--timeout=3m")


def test_a_pod_with_more_gpus_than_a_node_stays_pending(release: Release) -> None:
    release.upgrade(
        engines__big__model="example/big",
        engines__big__resources__requests=REQUESTS,
        engines__big__tensorParallelSize="32",  # the most devices that a claim may have
        engines__big__gpu__allocation="dra",
    )
    eventually("the small pod runs, the large one waits for its claim", lambda: states(release) == ["Running", CLAIM])
    run("helm", "test", release.name, "--namespace", release.namespace, "--timeout=3m",
        "--filter=name=proa-test-builtin")  # fmt: skip


def states(release: Release) -> list[str]:
    """Of each engine pod: its phase, or why the scheduler finds no node for it."""
    return sorted(state(pod["status"]) for pod in release.pods("engine"))


def state(status: dict[str, Any]) -> str:
    refused = [each.get("message", "") for each in status.get("conditions", []) if each["type"] == "PodScheduled"]
    return CLAIM if any(CLAIM in message for message in refused) else str(status["phase"])


def test_the_claim_is_released(release: Release) -> None:
    release.install()
    eventually("no claim is left", lambda: not release.get("resourceclaims")["items"])
