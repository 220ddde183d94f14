"""A pool grows by its queue and comes up from nothing. The metrics API is the test's own (support/metrics_api.py)."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support import metrics_api
from support.certificates import self_signed
from support.kube import Release, eventually, run
from support.traffic import traffic

DEPLOYMENT = "deployment/proa-engine-builtin"


@pytest.fixture
def metrics_adapter(release: Release, tmp_path: Path) -> Iterator[None]:
    """Serves the release's engine metrics as custom metrics of the cluster."""
    tls = self_signed(tmp_path, f"metrics.{release.namespace}.svc")
    release.kubectl("create", "secret", "tls", "metrics", f"--cert={tls.certificate}", f"--key={tls.key}")
    release.kubectl("create", "configmap", "metrics", f"--from-file=metrics_api.py={metrics_api.__file__}")
    release.kubectl("create", "serviceaccount", "metrics")
    release.kubectl("create", "role", "metrics", "--verb=list", "--resource=pods")
    release.kubectl(
        "create", "rolebinding", "metrics", "--role=metrics", f"--serviceaccount={release.namespace}:metrics"
    )
    release.kubectl("create", "service", "clusterip", "metrics", "--tcp=443:8443")
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": [_pod(release), _api_service(release)]})
    run("kubectl", "apply", "--filename=-", stdin=objects)
    try:
        release.kubectl("wait", "pod/metrics", "--for=condition=Ready", "--timeout=2m")
        yield
    finally:
        run("kubectl", "delete", "apiservice", "v1beta2.custom.metrics.k8s.io", "--ignore-not-found")


def test_a_pool_grows_by_its_queue(release: Release, metrics_adapter: None) -> None:
    release.install(
        engines__builtin__autoscaling__enabled="true",
        engines__builtin__autoscaling__maxReplicas="2",
        engines__builtin__autoscaling__target="1",
        **{"engines__builtin__extraArgs[0]": "--max-num-seqs=4"},
    )
    with traffic(release, "--clients=32", "--max-tokens=200", "--ignore-eos") as running:
        eventually(
            "the pool has a second engine", lambda: release.get(DEPLOYMENT)["status"].get("readyReplicas") == 2, 300
        )
        running.stop()
        assert running.failures() == []


def test_a_request_is_held_while_the_first_engine_comes_up(release: Release) -> None:
    release.install(engines__builtin__replicas="0", gateway__scaleFromZero__timeoutSeconds="180")
    eventually("no engine is left", lambda: not release.get("pods", release.selector("engine"))["items"])
    with release.client() as client, ThreadPoolExecutor(1) as pool:  # a client of the gateways that hold requests
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        answer = pool.submit(
            lambda: client.with_options(timeout=200).chat.completions.create(
                model="proa-builtin", messages=messages, temperature=0
            )
        )
        with pytest.raises(TimeoutError):
            answer.result(timeout=5)
        release.kubectl("scale", DEPLOYMENT, "--replicas=1")
        assert "Paris" in (answer.result(timeout=200).choices[0].message.content or "")


def _pod(release: Release) -> dict[str, Any]:
    mounts = [{"name": "script", "mountPath": "/script"}, {"name": "tls", "mountPath": "/tls"}]
    container = {
        "name": "metrics",
        "image": f"{release.registry}/proa-gateway:{release.tag}",
        "command": ["python3", "/script/metrics_api.py", "/tls/tls.crt", "/tls/tls.key"],
        "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 1},
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "metrics", "namespace": release.namespace, "labels": {"app": "metrics"}},
        "spec": {
            "serviceAccountName": "metrics",
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [
                {"name": "script", "configMap": {"name": "metrics"}},
                {"name": "tls", "secret": {"secretName": "metrics"}},
            ],
        },
    }


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
