"""The chart on a real cluster: install, chat, scale, lose a pod, tensor-parallel sidecars, uninstall. In this order."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest
from openai import OpenAI

from support.kube import Release, eventually, run

QUESTION = "What is the capital of France?"


def ask(client: OpenAI, question: str = QUESTION) -> str:
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model="proa-builtin", messages=messages, temperature=0, max_tokens=48)
    return answer.choices[0].message.content or ""


@contextmanager
def traffic(client: OpenAI, clients: int = 4) -> Iterator[list[str]]:
    """Asks without a pause until the end of the block; yields the growing list of answers. A failed request fails."""
    answers: list[str] = []
    enough = Event()

    def keep_asking() -> None:
        while not enough.is_set():
            answers.append(ask(client))

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(keep_asking) for _ in range(clients)]
        try:
            yield answers
        finally:
            enough.set()
    for future in running:
        future.result()


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
    with traffic(client) as answers:
        eventually("requests are answered", lambda: len(answers) >= 4)
        release.kubectl("delete", "pod", doomed, "--timeout=2m")
        release.kubectl("rollout", "status", "deployment/proa-engine-builtin", "--timeout=5m")
        answered = len(answers)
        eventually("requests are still answered", lambda: len(answers) >= answered + 8)
    assert set(answers) == {ask(client)}


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

    eventually("the pods without a sidecar are gone", only_sidecar_pods)
    assert ask(client) == expected


def test_an_engine_that_restarts_meets_its_sidecar_again(release: Release, client: OpenAI) -> None:
    (pod,) = release.pods("engine")
    name, expected = pod["metadata"]["name"], ask(client)
    release.kubectl("exec", name, "--container=engine", "--", "sh", "-c", "kill 1")

    def both_restarted() -> bool:
        status = release.get("pod", name)["status"]
        return all(c["restartCount"] for c in status["containerStatuses"] + status["initContainerStatuses"])

    eventually("both containers have restarted", both_restarted)
    release.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=3m")
    assert ask(client) == expected


def test_a_worker_that_dies_takes_its_pod_out_until_it_is_back(release: Release, client: OpenAI) -> None:
    (pod,) = release.pods("engine")
    name, expected = pod["metadata"]["name"], ask(client)
    addresses = ["endpointslices", "--selector=kubernetes.io/service-name=proa-engine"]

    def is_serving() -> bool:
        endpoints = [endpoint for item in release.get(*addresses)["items"] for endpoint in item["endpoints"]]
        return any(endpoint["conditions"]["serving"] for endpoint in endpoints)

    assert is_serving()
    release.kill_at_next_work(name, "tp-worker-1")
    with ThreadPoolExecutor() as pool:
        pool.submit(ask, client)  # the work; whether it is answered is another test's
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
