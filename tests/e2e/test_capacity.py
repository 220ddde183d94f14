"""Capacity: a thousand streams through one gateway, KV blocks freed on disconnect, a model that loads slowly."""

from datetime import datetime
from typing import Any

import pytest
from openai import OpenAI

from support.kube import ONE_THREAD, Release, eventually
from support.traffic import traffic

SLOW_START_SECONDS = 45


@pytest.fixture(scope="module", autouse=True)
def _one_gateway(release: Release) -> None:
    # On a slow machine, the streams beyond two engines' max_num_seqs wait longer than the default 60 s.
    release.install(engines__builtin__replicas="2", gateway__queue__timeoutSeconds="300")


def test_a_thousand_streams_at_once_through_one_gateway(release: Release) -> None:
    assert len(release.pods("gateway")) == 1
    # Responses that take far longer than sending all requests.
    arguments = ("--clients=1000", "--requests=1", "--max-tokens=300", "--ignore-eos", "--timeout=300")
    with traffic(release, *arguments) as running:
        running.join(600)
        answers = running.answers()
    assert [answer.error for answer in answers if answer.error] == []
    assert len(answers) == 1000
    assert max(answer.began for answer in answers) < min(answer.ended for answer in answers), (
        "all streams were open at once"
    )


def test_a_disconnect_frees_the_blocks_of_the_request(release: Release, client: OpenAI) -> None:
    def usage() -> float:
        names = [pod["metadata"]["name"] for pod in release.pods("engine")]
        return sum(release.metric(name, "vllm:kv_cache_usage_perc") for name in names)

    eventually("the engines are idle", lambda: usage() == 0)
    messages: Any = [{"role": "user", "content": "Count from 1 to 50."}]
    stream = client.chat.completions.create(
        model="proa-builtin",
        messages=messages,
        temperature=0,
        stream=True,
        max_tokens=1900,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    eventually("blocks are in use", lambda: usage() > 0, seconds=20)
    stream.close()
    eventually("no block is in use", lambda: usage() == 0, seconds=5)


def test_slow_loading_does_not_trip_liveness(release: Release) -> None:
    """The startup probe holds off the liveness probe until the engine has loaded, here longer than liveness allows."""
    slow = f"import os, time; os.getpid() == 1 and time.sleep({SLOW_START_SECONDS})"
    release.kubectl("create", "configmap", "slow", f"--from-literal=sitecustomize.py={slow}")
    release.install(
        engines__builtin__env=[ONE_THREAD, {"name": "PYTHONPATH", "value": "/slow:/code"}],
        engines__builtin__volumes=[{"name": "slow", "configMap": {"name": "slow"}}],
        engines__builtin__volumeMounts=[{"name": "slow", "mountPath": "/slow"}],
    )
    (pod,) = release.pods("engine")
    (status,) = pod["status"]["containerStatuses"]
    (ready,) = (condition for condition in pod["status"]["conditions"] if condition["type"] == "Ready")
    loading = time_of(ready["lastTransitionTime"]) - time_of(status["state"]["running"]["startedAt"])
    liveness = pod["spec"]["containers"][0]["livenessProbe"]
    window = liveness["periodSeconds"] * liveness["failureThreshold"] + liveness["timeoutSeconds"]
    assert loading.total_seconds() >= SLOW_START_SECONDS > window
    assert status["restartCount"] == 0
    # A container that is being restarted may still become ready in its grace period, so look for the decision as well.
    events = release.get("events", f"--field-selector=involvedObject.name={pod['metadata']['name']},reason=Killing")
    assert [event["message"] for event in events["items"]] == []


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text)
