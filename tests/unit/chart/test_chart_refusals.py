"""Values that cannot work are rejected before anything is installed, with a sentence that names them."""

from typing import Any

import pytest

from support.chart import CLAIMED, EXCHANGE, GPUS, SIDECAR, needs_helm, render, template

pytestmark = needs_helm
HTTP_ROUTE = {"gateway.httpRoute.enabled": True}
LORA = {"enginePool.lora.enabled": True}
SQL = [{"name": "sql", "path": "/adapters/sql"}]
ALL_SCALERS = {"enginePool.autoscaling.enabled": True, "enginePool.keda.enabled": True}
SMALL_DISK = {"limits": {"ephemeral-storage": "10Gi"}}
HOST = {"enginePool.hostCache.sizeGb": 1}
EXCHANGING = {**HOST, "enginePool.kvTransfer.enabled": True}
PREFILL = {**EXCHANGING, "enginePool.role": "prefill"}
KEDA = {"enginePool.keda.enabled": True, "gateway.scaleFromZero.timeoutSeconds": 60}
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
        ({"engines.a-name-that-is-much-too-long.replicas": 1}, "a pool name may have at most 20 characters"),
        (
            {**GPUS, **SIDECAR},
            "tensorParallel.mode sidecar cannot share GPUs that a device plugin allocates to one container; "
            "use mode process, or gpu.allocation dra",
        ),
        (
            {"enginePool.resources": {"limits": {"nvidia.com/gpu": 1}}},
            "resources contains nvidia.com/gpu; use gpu.allocation instead",
        ),
        (
            {"enginePool.modelVolume.claimName": "weights", "enginePool.model": "org/big"},
            "modelVolume.claimName is set, but model org/big is not a folder under /models",
        ),
        (
            {"enginePool.modelVolume.image": "r/weights:1", "enginePool.model": "org/big"},
            "modelVolume.image is set, but model org/big is not a folder under /models",
        ),
        (
            {"enginePool.modelVolume": {"image": "r/weights:1", "claimName": "weights"}, "enginePool.model": "/models"},
            "modelVolume.claimName and modelVolume.image would both be mounted at /models; set one of them",
        ),
        (
            {"enginePool.huggingFace": {"cacheClaim": "kept", "newClaim": {"size": "9Gi"}}},
            "huggingFace.cacheClaim names a claim, and huggingFace.newClaim.size creates one; set one of them",
        ),
        (
            {"gateway.autoscaling.minReplicas": 9},
            "gateway.autoscaling.minReplicas is more than gateway.autoscaling.maxReplicas",
        ),
        ({"enginePool.lora.modules": SQL}, "engines.builtin: lora.modules is set, but lora.enabled is false"),
        ({"enginePool.lora.modules": [{"name": "sql"}]}, "path"),
        ({**LORA, "enginePool.lora.modules": SQL * 2}, "lora.modules has the name sql twice"),
        ({**LORA, "enginePool.lora.maxCpuLoras": 3}, "lora.maxCpuLoras is less than lora.maxLoras"),
        (
            {**LORA, "enginePool.lora.maxLoras": 1, "enginePool.lora.modules": SQL * 5},
            "lora.modules has more adapters than lora.maxCpuLoras, by default 4 times lora.maxLoras",
        ),
        (ALL_SCALERS, "autoscaling and keda would both set the number of pods; enable only one"),
        ({"enginePool.autoscaling.minReplicas": 5}, "autoscaling.minReplicas is more than autoscaling.maxReplicas"),
        (
            {"enginePool.keda.enabled": True},
            "keda.minReplicas 0 requires gateway.scaleFromZero.timeoutSeconds, or every request fails while no pod",
        ),
        ({"enginePool.keda.minReplicas": 5}, "keda.minReplicas is more than keda.maxReplicas"),
        (
            {"enginePool.rollingUpdate": NO_ROOM},
            "engines.builtin: rollingUpdate cannot make progress with maxSurge and maxUnavailable 0",
        ),
        (
            {"gateway.rollingUpdate": NO_ROOM},
            "gateway: rollingUpdate cannot make progress with maxSurge and maxUnavailable 0",
        ),
        ({"fullnameOverride": "9lives"}, 'object names would begin with "9lives": a Service name needs'),
        ({"fullnameOverride": "my.release"}, 'object names would begin with "my.release": a Service name needs'),
        ({"nameOverride": "a" * 31}, "has room for 35 characters; set fullnameOverride"),
        (
            {"engines.builtin": {}, "engines.big": {"model": "org/big", "servedModelAliases": ["proa-builtin"]}},
            "engines.big: servedModelAliases has proa-builtin, which is the name of a model already",
        ),
        (
            {"serviceAccount.create": False},
            "serviceAccount.create is false: set serviceAccount.name to an existing ServiceAccount",
        ),
        (
            {"engine.healthPort": 50051},
            "engine.port, engine.metricsPort and engine.healthPort must differ",
        ),
        (
            {"gateway.healthPort": 8000},
            "gateway.port, gateway.healthPort and, if KEDA asks gateways, gateway.scalerPort",
        ),
        ({**KEDA, "gateway.scalerPort": 8081}, "gateway.scalerPort must differ: they are ports of one pod"),
        (
            {**KEDA, "enginePool.keda.sessionTarget": 0.9},
            "keda.sessionTarget is set, but gateway.sessionAdmission.mode is off",
        ),
        (
            {
                **KEDA,
                "enginePool.keda.minReplicas": 1,
                "enginePool.keda.sessionTarget": 0.9,
                "gateway.sessionAdmission.mode": "wait",
                "enginePool.role": "prefill",
            },
            "conversations have no places on engines of the role prefill",
        ),
        (
            {**KEDA, "enginePool.keda.query": "up"},
            "keda.query is set, but keda.trigger is gateway, which has no query; set keda.trigger prometheus",
        ),
        (
            {"networkPolicy.gateway.from": [{"podSelector": {}}], "monitoring.enabled": True},
            "networkPolicy.metrics.from cannot allow every pod: set it to Prometheus",
        ),
        (
            {"engines.builtin": {}, "engines.big": {"model": "org/big", "servedModelName": "proa-builtin"}},
            "model org/big has the same served model name as another pool's model: proa-builtin; set servedModelName",
        ),
        (
            {"enginePool.extraArgs": ["--model=org/big"]},
            "extraArgs contains --model, which the chart sets; use the chart value instead",
        ),
        ({"enginePool.extraArgs": ["--tensor-parallel-size", "2"]}, "extraArgs contains --tensor-parallel-size, which"),
        (
            {"enginePool.env": [{"name": "PROA_TENSOR_PARALLEL_SIZE", "value": "2"}]},
            "env contains PROA_TENSOR_PARALLEL_SIZE, the variable of --tensor-parallel-size, which the chart sets; use",
        ),
        (
            {"enginePool.shmSize": "4Gi"},
            "the memory limit 4Gi cannot hold shmSize 4Gi, images.processorCacheGb 1 GiB and hostCache 0 GiB",
        ),
        (
            {"enginePool.hostCache.sizeGb": 3},
            "the memory limit 4Gi cannot hold shmSize 1Gi, images.processorCacheGb 1 GiB and hostCache 3 GiB",
        ),
        (
            {"enginePool.extraArgs": ["--kv-offloading-size=3"]},
            "extraArgs contains --kv-offloading-size, which the chart sets; use the chart value instead",
        ),
        (
            {"enginePool.resources": {"limits": {"memory": "1000M"}}},
            "the memory limit 1000M cannot hold shmSize 1Gi",
        ),
        (
            {"enginePool.resources": {"limits": {"memory": "2Gi"}, "requests": {"memory": "3Gi"}}},
            "the memory request 3Gi is more than the limit 2Gi",
        ),
        ({"engines": {"builtin": None}}, "/engines/builtin"),
        (
            {"enginePool.hostCache.survivesRestart": True},
            "hostCache.survivesRestart is set, but hostCache.sizeGb is 0: blocks go through host memory",
        ),
        ({"enginePool.diskCache.sizeGb": 1}, "diskCache.sizeGb is set, but hostCache.sizeGb is 0"),
        ({"enginePool.kvTransfer.enabled": True}, "kvTransfer.enabled is set, but hostCache.sizeGb is 0"),
        ({"enginePool.diskCache.claimName": "c"}, "diskCache.claimName is set, but diskCache.sizeGb is 0"),
        (
            {**HOST, "enginePool.diskCache.sizeGb": 10, "enginePool.resources": SMALL_DISK},
            "the limit 10Gi of ephemeral-storage cannot hold diskCache, which takes up to 11 GiB in a container",
        ),
        (
            {"enginePool.role": "decode"},
            "role decode requires kvTransfer.enabled: engines of role decode fetch the blocks of prompts from",
        ),
        (
            PREFILL,
            "all pools of model proa-builtin have role prefill; add one of role decode, which generates the outputs",
        ),
        (
            {**PREFILL, "engines.other": {}},
            "role prefill, but no blocks can be exchanged with other: the pools need kvTransfer.enabled",
        ),
        (
            {**PREFILL, "engines.other": {**EXCHANGE, "tensorParallelSize": 2}},
            "equal tensorParallelSize, kind of device (gpu.allocation) and model flags in extraArgs",
        ),
        (
            {**PREFILL, "engines.other": {**EXCHANGE, "extraArgs": ["--dtype", "float16"]}},
            "engines.builtin: role prefill, but no blocks can be exchanged with other",
        ),
        (
            {**PREFILL, "engines.other": EXCHANGE, **KEDA},
            "keda.minReplicas 0 cannot work with role prefill: no request waits for such a pod",
        ),
        (
            {**EXCHANGING, "engine.kvPort": 9399, "enginePool.tensorParallelSize": 2},
            "engine.kvPort 9399 and the ports of further ranks up to 9400 contain 9400, another port of the pod",
        ),
        (
            {"enginePool.modelVolume.claimName": "weights", "enginePool.model": "/modelsbig"},
            "model /modelsbig is not a folder under /models",
        ),
        (HTTP_ROUTE, "gateway.httpRoute.parentRefs is empty"),
    ],
)
def test_a_wrong_value_is_rejected_with_a_sentence(values: dict[str, Any], sentence: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert sentence in done.stderr


@pytest.mark.parametrize("path", ["gateway.images", "gateway.scaleFromZero.timeoutSeconds"])
def test_values_of_an_older_chart_are_rejected_with_what_to_do(path: str) -> None:
    """With null, Helm removes a default, as `helm upgrade --reuse-values` does with those of new values."""
    assert (
        f"the value {path} is missing: it was set to null, or --reuse-values kept the values of a chart version "
        "without it; use helm upgrade --reset-then-reuse-values" in template({path: None}).stderr
    )


def test_gpu_claims_are_rejected_before_kubernetes_1_34() -> None:
    done = template(CLAIMED, "--kube-version=1.33.4")
    assert (
        "gpu.allocation dra requires resource.k8s.io/v1 (Kubernetes 1.34 or newer), the cluster has v1.33.4"
        in done.stderr
    )
    assert render(CLAIMED, "--kube-version=1.34.0")


def test_model_images_are_rejected_before_kubernetes_1_35() -> None:
    values = {"enginePool.modelVolume.image": "r/weights:1", "enginePool.model": "/models"}
    done = template(values, "--kube-version=1.34.2")
    assert (
        "modelVolume.image requires image volumes (Kubernetes 1.35 or newer), the cluster has v1.34.2; "
        "use modelVolume.claimName" in done.stderr
    )
    assert render(values, "--kube-version=1.35.0")


def test_an_old_kubernetes_is_rejected() -> None:
    assert "chart requires kubeVersion: >=1.30.0-0" in template({}, "--kube-version=1.29.9").stderr
