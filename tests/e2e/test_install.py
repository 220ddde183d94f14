"""The chart on a cluster: install, chat, scale, delete a pod, tensor-parallel sidecars, uninstall; in this order."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from support.chat import QUESTION, ask, deltas
from support.kube import Release, eventually, run
from support.traffic import traffic


@pytest.mark.smoke
def test_helm_test_passes(release: Release) -> None:
    run("helm", "test", release.name, "--namespace", release.namespace, "--timeout=5m", timeout=330)


@pytest.mark.smoke
def test_chat_streams_through_the_service(client: OpenAI) -> None:
    found = deltas(client)
    assert "Paris" in "".join(found)
    assert len(found) > 3


def test_pods_run_as_declared(release: Release) -> None:
    for component in ("gateway", "engine"):
        (pod,) = release.pods(component)
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        command = ["exec", pod["metadata"]["name"], f"--container={component}", "--"]
        assert release.kubectl(*command, "id", "-u").strip() == "65532"
        assert "Read-only file system" in release.kubectl(*command, "sh", "-c", "touch /code/x 2>&1 || true")


def test_two_engines_are_both_used(release: Release, client: OpenAI) -> None:
    release.install(engines__builtin__replicas="2")
    names = [pod["metadata"]["name"] for pod in release.pods("engine")]
    assert len(names) == 2

    def both_used() -> bool:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: ask(client), range(32)))
        return all(release.generated_tokens(name) > 0 for name in names)

    eventually("both engines generate tokens", both_used)


def test_no_request_fails_when_an_engine_pod_is_deleted(release: Release, client: OpenAI) -> None:
    doomed = release.pods("engine")[0]["metadata"]["name"]
    with traffic(release, f"--question={QUESTION}", "--max-tokens=48") as running:
        running.wait_for(4)
        release.kubectl("delete", "pod", doomed, "--timeout=2m")
        release.wait_for_rollout("proa-engine-builtin")
        running.wait_for(8)
        running.stop()
        assert running.failures() == []
        assert {answer.text for answer in running.answers()} == {ask(client)}


def test_a_tensor_parallel_sidecar_gives_the_same_answer(release: Release, client: OpenAI) -> None:
    expected = ask(client)
    release.install(
        engines__builtin__replicas="1",
        engines__builtin__tensorParallelSize="2",
        engines__builtin__tensorParallel__mode="sidecar",
    )

    def only_sidecar_pods() -> bool:
        pods = release.get("pods", release.selector("engine"))["items"]
        return len(pods) == 1 and [c["name"] for c in pods[0]["spec"].get("initContainers", [])] == ["tp-worker-1"]

    eventually("only a pod with a sidecar is left", only_sidecar_pods)
    assert ask(client) == expected


def test_a_restarted_engine_reconnects_to_its_sidecar(release: Release, client: OpenAI) -> None:
    (pod,) = release.pods("engine")
    name, expected = pod["metadata"]["name"], ask(client)
    release.kubectl("exec", name, "--container=engine", "--", "sh", "-c", "kill 1")

    def both_restarted() -> bool:
        status = release.get("pod", name)["status"]
        return all(c["restartCount"] for c in status["containerStatuses"] + status["initContainerStatuses"])

    eventually("both containers have restarted", both_restarted)
    release.wait_for_pod(name)
    assert ask(client) == expected


def test_a_pod_is_not_serving_until_its_killed_worker_is_back(release: Release, client: OpenAI) -> None:
    (pod,) = release.pods("engine")
    name, expected = pod["metadata"]["name"], ask(client)
    addresses = ["endpointslices", "--selector=kubernetes.io/service-name=proa-engine"]

    def is_serving() -> bool:
        endpoints = [endpoint for item in release.get(*addresses)["items"] for endpoint in item["endpoints"]]
        return any(endpoint["conditions"]["serving"] for endpoint in endpoints)

    assert is_serving()
    release.kill_at_next_work(name, "tp-worker-1")
    with ThreadPoolExecutor() as pool:
        pool.submit(ask, client)  # makes the worker compute; other tests check the response
        eventually("the pod has left the endpoints", lambda: not is_serving(), seconds=60)
    eventually("the pod is back", is_serving, seconds=180)
    assert ask(client) == expected


def test_uninstall_leaves_nothing(release: Release) -> None:
    release.uninstall()
    kinds = "deployments,replicasets,services,endpointslices,serviceaccounts,roles,rolebindings,configmaps,secrets,pods"

    def left() -> list[str]:
        names = release.kubectl("get", kinds, "--output=name").split()
        return [name for name in names if not name.endswith(("/default", "/kube-root-ca.crt"))]

    eventually("nothing of the release is left", lambda: not left(), seconds=180)
