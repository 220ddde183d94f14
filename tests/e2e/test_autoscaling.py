"""A pool scales up with its queue, and from zero. The metrics API is the test's own (support/metrics_api.py)."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support import metrics_api
from support.certificates import self_signed
from support.chat import ask
from support.kube import Release, eventually, run
from support.script_pod import script_pod
from support.traffic import traffic

DEPLOYMENT = "deployment/proa-engine-builtin"


@pytest.fixture
def metrics_adapter(release: Release, tmp_path: Path) -> Iterator[None]:
    """Serve the release's engine metrics in the cluster's custom metrics API."""
    tls = self_signed(tmp_path, f"metrics.{release.namespace}.svc")
    release.kubectl("create", "secret", "tls", "metrics-tls", f"--cert={tls.certificate}", f"--key={tls.key}")
    release.kubectl("create", "serviceaccount", "metrics")
    release.kubectl("create", "role", "metrics", "--verb=list", "--resource=pods")
    account = f"--serviceaccount={release.namespace}:metrics"
    release.kubectl("create", "rolebinding", "metrics", "--role=metrics", account)
    release.kubectl("create", "service", "clusterip", "metrics", "--tcp=443:8443")  # selects app=metrics
    adapter = script_pod(
        release,
        "metrics",
        Path(metrics_api.__file__),
        "/tls/tls.crt",
        "/tls/tls.key",
        port=8443,
        labels={"app": "metrics"},
        volumes={"tls": {"secret": {"secretName": "metrics-tls"}}},
        serviceAccountName="metrics",
    )
    try:
        with adapter:
            release.apply(_api_service(release))
            yield
    finally:
        run("kubectl", "delete", "apiservice", "v1beta2.custom.metrics.k8s.io", "--ignore-not-found")


def test_a_pool_scales_up_with_its_queue(release: Release, metrics_adapter: None) -> None:
    release.install(
        gateway__queue__timeoutSeconds="300",  # on a slow machine the queue is longer than the default 60 s
        engines__builtin__autoscaling__enabled="true",
        engines__builtin__autoscaling__maxReplicas="2",
        engines__builtin__autoscaling__target="1",
        engines__builtin__autoscaling__queueTarget="1",
        **{"engines__builtin__extraArgs[0]": "--max-num-seqs=4"},
    )
    with traffic(release, "--clients=32", "--max-tokens=200", "--ignore-eos") as running:
        eventually(
            "the pool has a second engine", lambda: release.get(DEPLOYMENT)["status"].get("readyReplicas") == 2, 300
        )
        running.stop()
        assert running.failures() == []


def test_a_request_is_held_while_the_first_engine_starts(release: Release) -> None:
    release.install(engines__builtin__replicas="0", gateway__scaleFromZero__timeoutSeconds="180")
    eventually("no engine is left", lambda: not release.get("pods", release.selector("engine"))["items"])
    with release.client() as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client.with_options(timeout=200))
        with pytest.raises(TimeoutError):
            answer.result(timeout=5)
        release.kubectl("scale", DEPLOYMENT, "--replicas=1")
        assert "Paris" in answer.result(timeout=200)


def _api_service(release: Release) -> dict[str, Any]:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": "v1beta2.custom.metrics.k8s.io"},
        "spec": {
            "group": "custom.metrics.k8s.io",
            "version": "v1beta2",
            "service": {"name": "metrics", "namespace": release.namespace},
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
