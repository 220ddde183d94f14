"""GPUs by dynamic resource allocation: one claim shared by all containers of a pod.

Skipped if the cluster has no DeviceClass gpu.nvidia.com. The driver may simulate GPUs: the engine computes on the CPU;
the test checks that the claim is allocated, shared by engine and worker, and released.
"""

import pytest

from support.kube import Release, eventually, run


@pytest.fixture(scope="module", autouse=True)
def _gpus() -> None:
    if not run("kubectl", "get", "deviceclass", "gpu.nvidia.com", "--output=name", check=False):
        pytest.skip("not run: the cluster has no DeviceClass gpu.nvidia.com")


def test_engine_and_sidecar_share_one_claim(release: Release) -> None:
    release.install(
        engines__builtin__gpu__allocation="dra",
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
        engines__big__model="example/big", engines__big__tensorParallelSize="64", engines__big__gpu__allocation="dra"
    )

    def phases() -> list[str]:
        return sorted(pod["status"]["phase"] for pod in release.pods("engine"))

    eventually("the large pod is pending, the small one running", lambda: phases() == ["Pending", "Running"])
    run("helm", "test", release.name, "--namespace", release.namespace, "--timeout=3m",
        "--filter=name=proa-test-builtin")  # fmt: skip


def test_the_claim_is_released(release: Release) -> None:
    release.install()
    eventually("no claim is left", lambda: not release.get("resourceclaims")["items"])
