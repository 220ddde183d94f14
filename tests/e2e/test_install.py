"""The chart on a real cluster: install, chat, scale, lose a pod, tensor-parallel sidecars, uninstall. In this order."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from support.kube import Release, eventually, run

QUESTION = "What is the capital of France?"


def ask(client: OpenAI, question: str = QUESTION) -> str:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model="proa-builtin", messages=messages, temperature=0, max_tokens=48)
    return answer.choices[0].message.content or ""


@pytest.mark.smoke
def test_helm_test_passes(release: Release) -> None:
    run("helm", "test", release.name, "--namespace", release.namespace, "--timeout=5m", timeout=330)


@pytest.mark.smoke
def test_chat_streams_through_the_service(client: OpenAI) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    stream = client.chat.completions.create(model="proa-builtin", messages=messages, temperature=0, stream=True)
    deltas = [chunk.choices[0].delta.content for chunk in stream if chunk.choices]
    assert "Paris" in "".join(delta or "" for delta in deltas)
    assert len(deltas) > 3


def test_pods_run_as_declared(release: Release) -> None:
    for component in ("gateway", "engine"):
        (pod,) = release.pods(component)
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        command = ["exec", pod["metadata"]["name"], f"--container={component}", "--", "id", "-u"]
        assert release.kubectl(*command).strip() == "65532"


def test_two_engines_are_both_used(release: Release, client: OpenAI) -> None:
    release.install(engines__builtin__replicas="2")
    names = [pod["metadata"]["name"] for pod in release.pods("engine")]
    assert len(names) == 2

    def both_used() -> bool:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: ask(client), range(32)))
        return all(release.generated_tokens(name) > 0 for name in names)

    eventually("both engines generate tokens", both_used)


def test_requests_are_answered_after_an_engine_pod_is_deleted(release: Release, client: OpenAI) -> None:
    doomed = release.pods("engine")[0]["metadata"]["name"]
    release.kubectl("delete", "pod", doomed, "--wait=false")
    for _ in range(10):
        assert "Paris" in ask(client)
    release.kubectl("rollout", "status", "deployment/proa-engine-builtin", "--timeout=5m")


def test_a_tensor_parallel_sidecar_gives_the_same_answer(release: Release) -> None:
    with release.gateway() as url:
        expected = ask(OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60))
    release.install(
        engines__builtin__replicas="1",
        engines__builtin__tensorParallelSize="2",
        engines__builtin__tensorParallel__mode="sidecar",
    )

    def only_sidecar_pods() -> bool:
        pods = release.pods("engine")
        return len(pods) == 1 and [c["name"] for c in pods[0]["spec"].get("initContainers", [])] == ["tp-worker-1"]

    eventually("the pods without a sidecar are gone", only_sidecar_pods)
    with release.gateway() as url:
        assert ask(OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)) == expected


def test_uninstall_leaves_nothing(release: Release) -> None:
    release.uninstall()
    kinds = "deployments,replicasets,services,endpointslices,serviceaccounts,roles,rolebindings,configmaps,secrets,pods"

    def left() -> list[str]:
        names = release.kubectl("get", kinds, "--output=name").split()
        return [name for name in names if not name.endswith(("/default", "/kube-root-ca.crt"))]

    eventually("nothing of the release is left", lambda: not left(), seconds=180)
