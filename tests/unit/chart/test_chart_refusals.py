"""What cannot work is refused before anything is installed, each in a sentence."""

import json
from math import gcd
from typing import Any

import pytest

from support.chart import CLAIMED, GPUS, ROOT, SIDECAR, needs_helm, render, template

pytestmark = needs_helm
HTTP_ROUTE = {"gateway.httpRoute.enabled": True}
ALL_SCALERS = {"enginePool.autoscaling.enabled": True, "enginePool.keda.enabled": True}
NO_ROOM = {"maxUnavailable": 0, "maxSurge": "0%"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"enginePool.replica": 2}, "additional properties 'replica' not allowed"),
        ({"enginePool.tensorParallel.mode": "thread"}, "value must be one of"),
        ({"enginePool.tensorParallelSize": 0}, "minimum"),
        ({"enginePool.podDisruptionBudget.maxUnavailable": 0}, "minimum"),
        ({"gateway.podDisruptionBudget.maxUnavailable": "0%"}, "does not match pattern"),
        ({"gateway.port": 70000}, "maximum"),
        ({"otel.FOO": 1}, "FOO"),
        ({"engines": {"Upper": {}}}, "does not match pattern"),
        ({"engines.a-name-that-is-much-too-long.replicas": 1}, "the name of a pool may have at most 20 characters"),
        (
            {"enginePool.tensorParallelSize": 3},
            "tensorParallelSize 3 does not divide the built-in model's 6 heads and 2048 tokens; it runs on 1 or 2",
        ),
        (
            {**GPUS, **SIDECAR},
            "tensorParallel.mode sidecar cannot share GPUs that a device plugin gives to one container; "
            "use mode process, or gpu.allocation dra",
        ),
        (
            {"enginePool.resources": {"limits": {"nvidia.com/gpu": 1}}},
            "resources name nvidia.com/gpu; say gpu.allocation instead",
        ),
        (
            {"enginePool.modelVolume.claimName": "weights", "enginePool.model": "org/big"},
            "modelVolume names a claim, but model org/big is no folder under /models",
        ),
        (ALL_SCALERS, "autoscaling and keda would both set the number of pods; enable one"),
        ({"enginePool.autoscaling.minReplicas": 5}, "autoscaling.minReplicas is more than autoscaling.maxReplicas"),
        (
            {"enginePool.keda.enabled": True},
            "keda.minReplicas 0 needs gateway.scaleFromZero.timeoutSeconds, or every request would fail while no pod",
        ),
        ({"enginePool.keda.minReplicas": 5}, "keda.minReplicas is more than keda.maxReplicas"),
        (
            {"enginePool.rollingUpdate": NO_ROOM},
            "engines.builtin: rollingUpdate can neither take a pod away nor add one",
        ),
        ({"gateway.rollingUpdate": NO_ROOM}, "gateway: rollingUpdate can neither take a pod away nor add one"),
        ({"fullnameOverride": "9lives"}, 'named after "9lives", but a Service'),
        ({"fullnameOverride": "my.release"}, 'named after "my.release", but a Service'),
        ({"nameOverride": "a" * 31}, "has room for 35 characters of it; set fullnameOverride"),
        (
            {"serviceAccount.create": False},
            "serviceAccount.create is false, so the gateway needs the name of an account",
        ),
        (
            {"engine.healthPort": 50051},
            "engine.port, engine.metricsPort and engine.healthPort are three ports of one pod",
        ),
        (
            {"networkPolicy.gateway.from": [{"podSelector": {}}], "monitoring.enabled": True},
            "networkPolicy.metrics.from cannot be every pod; name Prometheus there",
        ),
        (
            {"engines.big": {"model": "org/big", "servedModelName": "proa-builtin"}},
            "another pool serves a model other than org/big under the same name, proa-builtin; set servedModelName",
        ),
        ({"enginePool.extraArgs": ["--model=org/big"]}, "extraArgs say --model, which the chart sets itself"),
        ({"enginePool.extraArgs": ["--tensor-parallel-size", "2"]}, "extraArgs say --tensor-parallel-size, which"),
        ({"enginePool.shmSize": "5Gi"}, "shmSize 5Gi is more than the memory limit 4Gi"),
        (
            {"enginePool.resources": {"limits": {"memory": "1000M"}}},
            "shmSize 1Gi is more than the memory limit 1000M",
        ),
        (
            {"enginePool.modelVolume.claimName": "weights", "enginePool.model": "/modelsbig"},
            "model /modelsbig is no folder under /models",
        ),
        (HTTP_ROUTE, "gateway.httpRoute belongs to no Gateway; name one in parentRefs"),
    ],
)
def test_a_wrong_value_is_refused_in_a_sentence(values: dict[str, Any], sentence: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_claims_of_gpus_are_refused_before_kubernetes_1_34() -> None:
    done = template(CLAIMED, "--kube-version=1.33.4")
    assert (
        "gpu.allocation dra needs resource.k8s.io/v1, that is Kubernetes 1.34 or newer, and this is v1.33.4"
        in done.stderr
    )
    assert render(CLAIMED, "--kube-version=1.34.0")


def test_an_old_kubernetes_is_refused() -> None:
    assert "chart requires kubeVersion: >=1.30.0-0" in template({}, "--kube-version=1.29.9").stderr


def test_the_built_in_model_is_refused_exactly_where_it_cannot_be_divided() -> None:
    config = json.loads((ROOT / "engine/proa_engine/builtin/model/config.json").read_text())
    sizes = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"))
    common = gcd(*sizes)
    for ranks in range(1, 9):
        assert (template({"enginePool.tensorParallelSize": ranks}).returncode == 0) == (common % ranks == 0)
