"""A model from an S3 bucket, kept on the node: downloaded once for its pods, and refused in one sentence."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from proa_engine.builtin import builtin_model_folder
from support.kube import Release, eventually
from support.s3_pod import PORT, bucket_keys, s3_pod

URL = "s3://models/builtin/v1"
TO_THE_STORE = [{"ports": [{"protocol": "TCP", "port": PORT}]}]


@pytest.fixture(scope="module", autouse=True)
def _store(release: Release) -> Iterator[None]:
    """The model's folder in the store. Volumes of the node are allowed in the namespace."""
    release.kubectl(
        "label", "namespace", release.namespace, "pod-security.kubernetes.io/enforce=privileged", "--overwrite"
    )
    release.apply(bucket_keys("bucket-keys"), bucket_keys("wrong-keys", "wrong"))
    with s3_pod(release, "models") as server:
        folder = builtin_model_folder()
        server.put(URL, {str(each.relative_to(folder)): each for each in folder.rglob("*") if each.is_file()})
        yield


def pool(release: Release, secret: str = "bucket-keys", **values: Any) -> dict[str, Any]:
    """Values of a pool as in charts/proa/examples/object-store.yaml, with a container that gives the folder of the
    node to the pods' user."""
    own = {
        "name": "chown",
        "image": f"{release.registry}/proa-engine:{release.tag}",
        "command": ["chown", "65532:65532", "/node"],
        "securityContext": {"runAsUser": 0, "runAsNonRoot": False},
        "volumeMounts": [{"name": "node", "mountPath": "/node"}],
    }
    return {
        "model": URL,
        "servedModelName": "stored",
        "envFrom": [{"secretRef": {"name": secret}}],
        "extraArgs": ["--download-dir=/node", "--download-cache-size=1g"],
        "initContainers": [own],
        "volumes": [{"name": "node", "hostPath": {"path": f"/tmp/{release.namespace}", "type": "DirectoryOrCreate"}}],
        "volumeMounts": [{"name": "node", "mountPath": "/node"}],
        **values,
    }


def test_pods_of_a_node_download_the_model_once(release: Release, client: OpenAI) -> None:
    release.install(networkPolicy__engine__egress=TO_THE_STORE, engines={"stored": pool(release, replicas=2)})
    pods = [each["metadata"]["name"] for each in release.pods("engine")]
    logs = [release.kubectl("logs", each, "--container=download") for each in pods]
    assert len(logs) == 2
    assert sum(f"downloaded {URL} in" in each for each in logs) == 1, logs
    (answer,) = client.completions.create(model="stored", prompt="The capital of France is", max_tokens=8).choices
    assert answer.text
    assert all("downloading" not in release.kubectl("logs", each, "--container=engine") for each in pods)
    release.kubectl("exec", pods[0], "--", "rm", "-rf", "/node/object-store")


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (
            "wrong-keys",
            {"secret": "wrong-keys"},
            f"{URL}: access denied (SignatureDoesNotMatch); the engine must be allowed to",
        ),
        ("no-bucket", {"model": "s3://nowhere/v1"}, "s3://nowhere/v1: there is no such bucket"),
    ],
)
def test_a_pod_whose_download_is_refused_ends_with_the_sentence(
    name: str, change: dict[str, Any], sentence: str, release: Release
) -> None:
    release.upgrade(networkPolicy__engine__egress=TO_THE_STORE, engines={name: pool(release, **change)})

    def message() -> str:
        pods = release.get("pods", f"--selector=proa/pool={name}")["items"]
        status = [each for pod in pods for each in pod["status"].get("initContainerStatuses", ())]
        ends = [(each["state"].get("terminated") or each["lastState"].get("terminated")) for each in status]
        return next((end["message"] for end in ends if end and end["exitCode"]), "")

    assert f"error: {sentence}" in eventually("the download ended", message)
