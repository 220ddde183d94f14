"""Each value of a pool and what it changes."""

import pytest

from support.chart import ENGINE, ENGINE_POD, GROUP, Case, needs_helm

pytestmark = needs_helm
ARGUMENTS = (*ENGINE, "args")
SPEC = ENGINE_POD[:3]
HPA = ("HorizontalPodAutoscaler", "proa-engine-builtin", "spec")
SCALED = ("ScaledObject", "proa-engine-builtin", "spec")
WITH_HPA = {"enginePool.autoscaling.enabled": True}
WITH_KEDA = {"enginePool.keda.enabled": True, "gateway.scaleFromZero.timeoutSeconds": 60}
WITH_QUERY = {**WITH_KEDA, "enginePool.keda.trigger": "prometheus"}
CLAIM = ("PersistentVolumeClaim", "proa-engine-builtin-cache", "spec")
WITH_CLAIM = {"enginePool.huggingFace.newClaim.size": "9Gi"}
LORA = {"enginePool.lora.enabled": True}
INIT = {"name": "first", "image": "busybox"}
DRA = {"enginePool.gpu.allocation": "dra"}
HOST_CACHE = {"enginePool.hostCache.sizeGb": 1}
DISK_CACHE = {**HOST_CACHE, "enginePool.diskCache.sizeGb": 10}

CASES = {
    "enginePool.image.repository": Case(value="nightly", at=(*ENGINE, "image"), expected="nightly:0.1.0"),
    "enginePool.image.tag": Case(value="v2", at=(*ENGINE, "image"), expected="proa-engine:v2"),
    "enginePool.model": Case(value="org/big", at=ARGUMENTS, contains="--model=org/big"),
    "enginePool.servedModelName": Case(value="big", at=ARGUMENTS, contains="--served-model-name=big"),
    "enginePool.servedModelAliases": Case(
        value=["gpt-4o", "small"], at=ARGUMENTS, contains="--served-model-name=small",
    ),
    "enginePool.modelVolume.claimName": Case(
        value="weights", at=(*ENGINE_POD, "volumes"), also={"enginePool.model": "/models/big"},
        contains={"name": "model", "persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
    ),
    "enginePool.modelVolume.image": Case(
        value="r/weights:1", at=(*ENGINE_POD, "volumes"), also={"enginePool.model": "/models"},
        contains={"name": "model", "image": {"reference": "r/weights:1"}},
    ),
    "enginePool.modelVolume.path": Case(
        value="/w", at=(*ENGINE, "volumeMounts"), contains={"name": "model", "mountPath": "/w", "readOnly": True},
        also={"enginePool.model": "/w/big", "enginePool.modelVolume.claimName": "weights"},
    ),
    "enginePool.lora.enabled": Case(value=True, at=ARGUMENTS, contains="--enable-lora"),
    "enginePool.lora.maxLoras": Case(value=2, at=ARGUMENTS, contains="--max-loras=2", also=LORA),
    "enginePool.lora.maxLoraRank": Case(value=64, at=ARGUMENTS, contains="--max-lora-rank=64", also=LORA),
    "enginePool.lora.maxCpuLoras": Case(value=40, at=ARGUMENTS, contains="--max-cpu-loras=40", also=LORA),
    "enginePool.lora.modules": Case(
        value=[{"name": "sql", "path": "/adapters/sql"}], at=ARGUMENTS, contains="--lora-modules=sql=/adapters/sql",
        also=LORA,
    ),
    "enginePool.lora.volume.claimName": Case(
        value="adapters", at=(*ENGINE_POD, "volumes"),
        contains={"name": "adapters", "persistentVolumeClaim": {"claimName": "adapters", "readOnly": True}},
    ),
    "enginePool.lora.volume.path": Case(
        value="/a", at=(*ENGINE, "volumeMounts"), contains={"name": "adapters", "mountPath": "/a", "readOnly": True},
        also={"enginePool.lora.volume.claimName": "adapters"},
    ),
    "enginePool.images.languageModelOnly": Case(value=True, at=ARGUMENTS, contains="--language-model-only"),
    "enginePool.images.encoderCacheSize": Case(
        value=20_000_000, at=ARGUMENTS, contains="--encoder-cache-size=20000000"
    ),
    "enginePool.images.processorCacheGb": Case(value=0.5, at=ARGUMENTS, contains="--mm-processor-cache-gb=0.5"),
    "enginePool.hostCache.sizeGb": Case(value=1.5, at=ARGUMENTS, contains="--kv-offloading-size=1.5"),
    "enginePool.hostCache.survivesRestart": Case(
        value=True, at=ARGUMENTS, contains="--kv-offloading-path=/dev/shm/proa", also=HOST_CACHE
    ),
    "enginePool.diskCache.sizeGb": Case(value=20, at=ARGUMENTS, contains="--kv-disk-size=20", also=HOST_CACHE),
    "enginePool.diskCache.claimName": Case(
        value="blocks", at=(*ENGINE_POD, "volumes"),
        contains={"name": "kv-disk", "persistentVolumeClaim": {"claimName": "blocks"}},
        also=DISK_CACHE,
    ),
    "enginePool.diskCache.writeMbPerSecond": Case(
        value=500, at=ARGUMENTS, contains="--kv-disk-write-mb-per-second=500", also=DISK_CACHE
    ),
    "enginePool.compileCache.claimName": Case(
        value="kernels", at=(*ENGINE_POD, "volumes"),
        contains={"name": "compile-cache", "persistentVolumeClaim": {"claimName": "kernels"}},
    ),
    "enginePool.kvTransfer.enabled": Case(
        value=True, at=ARGUMENTS, contains="--kv-transfer-address=:50061", also=HOST_CACHE
    ),
    "enginePool.huggingFace.tokenSecret": Case(
        value="hub", at=(*ENGINE, "env"),
        contains={"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ),
    "enginePool.huggingFace.tokenKey": Case(
        value="t", at=(*ENGINE, "env"), also={"enginePool.huggingFace.tokenSecret": "hub"},
        contains={"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}},
    ),
    "enginePool.huggingFace.cacheClaim": Case(
        value="kept", at=(*ENGINE_POD, "volumes"),
        contains={"name": "cache", "persistentVolumeClaim": {"claimName": "kept"}},
    ),
    "enginePool.huggingFace.newClaim.size": Case(
        value="9Gi", at=(*ENGINE_POD, "volumes"),
        contains={"name": "cache", "persistentVolumeClaim": {"claimName": "proa-engine-builtin-cache"}},
    ),
    "enginePool.huggingFace.newClaim.storageClassName": Case(
        value="fast", at=(*CLAIM, "storageClassName"), also=WITH_CLAIM
    ),
    "enginePool.huggingFace.newClaim.accessModes": Case(
        value=["ReadWriteMany"], at=(*CLAIM, "accessModes"), also=WITH_CLAIM
    ),
    "enginePool.role": Case(
        value="decode", at=ARGUMENTS, contains="--role=decode",
        also={**HOST_CACHE, "enginePool.kvTransfer.enabled": True},
    ),
    "enginePool.replicas": Case(value=0, at=(*SPEC, "replicas")),
    "enginePool.tensorParallelSize": Case(value=2, at=ARGUMENTS, contains="--tensor-parallel-size=2"),
    "enginePool.tensorParallel.mode": Case(
        value="sidecar", at=(*ENGINE_POD, "initContainers", 0, "name"), expected="tp-worker-1",
        also={"enginePool.tensorParallelSize": 2},
    ),
    "enginePool.pipelineParallelSize": Case(value=2, at=ARGUMENTS, contains="--pipeline-parallel-size=2"),
    "enginePool.expertParallel": Case(value=True, at=ARGUMENTS, contains="--enable-expert-parallel"),
    "enginePool.nodes": Case(
        value=2, at=(*GROUP, "leaderWorkerTemplate", "size"), also={"enginePool.tensorParallelSize": 2}
    ),
    "enginePool.gpu.allocation": Case(
        value="devicePlugin", at=(*ENGINE, "resources", "limits", "nvidia.com/gpu"), expected=1
    ),
    "enginePool.gpu.resourceName": Case(
        value="amd.com/gpu", at=(*ENGINE_POD, "tolerations"), contains={"key": "amd.com/gpu", "operator": "Exists"},
        also={"enginePool.gpu.allocation": "devicePlugin"},
    ),
    "enginePool.gpu.deviceClassName": Case(
        value="mig.nvidia.com", also=DRA,
        at=("ResourceClaimTemplate", "proa-engine-builtin-gpus-edad4821", "spec", "spec", "devices", "requests", 0,
            "exactly", "deviceClassName"),
    ),
    "enginePool.logLevel": Case(value="debug", at=ARGUMENTS, contains="--log-level=debug"),
    "enginePool.logFormat": Case(value="json", at=ARGUMENTS, contains="--log-format=json"),
    "enginePool.extraArgs": Case(value=["--max-num-seqs=4"], at=ARGUMENTS, contains="--max-num-seqs=4"),
    "enginePool.env": Case(
        value=[{"name": "A", "value": "b"}], at=(*ENGINE, "env"), contains={"name": "A", "value": "b"}
    ),
    "enginePool.resources": Case(
        value={"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}, at=(*ENGINE, "resources")
    ),
    "enginePool.shmSize": Case(value="2Gi", at=(*ENGINE_POD, "volumes", 0, "emptyDir", "sizeLimit")),
    "enginePool.drainSeconds": Case(value=100, at=(*ENGINE_POD, "terminationGracePeriodSeconds"), expected=115),
    "enginePool.startupSeconds": Case(value=60, at=(*ENGINE, "startupProbe", "failureThreshold"), expected=30),
    "enginePool.rollingUpdate": Case(
        value={"maxUnavailable": 1, "maxSurge": 0}, at=(*SPEC, "strategy", "rollingUpdate")
    ),
    "enginePool.podDisruptionBudget.enabled": Case(
        value=True, at=("PodDisruptionBudget", "proa-engine-builtin", "spec", "selector", "matchLabels", "proa/pool"),
        expected="builtin",
    ),
    "enginePool.podDisruptionBudget.maxUnavailable": Case(
        value=2, at=("PodDisruptionBudget", "proa-engine-builtin", "spec", "maxUnavailable")
    ),
    "enginePool.autoscaling.enabled": Case(
        value=True, at=(*HPA, "scaleTargetRef", "name"), expected="proa-engine-builtin"
    ),
    "enginePool.autoscaling.minReplicas": Case(value=2, at=(*HPA, "minReplicas"), also=WITH_HPA),
    "enginePool.autoscaling.maxReplicas": Case(value=9, at=(*HPA, "maxReplicas"), also=WITH_HPA),
    "enginePool.autoscaling.metric": Case(
        value="waiting", at=(*HPA, "metrics", 0, "pods", "metric", "name"), also=WITH_HPA
    ),
    "enginePool.autoscaling.queueMetric": Case(
        value="held", at=(*HPA, "metrics", 1, "object", "metric", "name"), also=WITH_HPA
    ),
    "enginePool.autoscaling.target": Case(
        value="500m", at=(*HPA, "metrics", 0, "pods", "target", "averageValue"), also=WITH_HPA
    ),
    "enginePool.autoscaling.queueTarget": Case(
        value="500m", at=(*HPA, "metrics", 1, "object", "target", "averageValue"), also=WITH_HPA
    ),
    "enginePool.keda.enabled": Case(
        value=True, at=(*SCALED, "scaleTargetRef", "name"), expected="proa-engine-builtin", also=WITH_KEDA
    ),
    "enginePool.keda.minReplicas": Case(value=1, at=(*SCALED, "minReplicaCount"), also=WITH_KEDA),
    "enginePool.keda.maxReplicas": Case(value=9, at=(*SCALED, "maxReplicaCount"), also=WITH_KEDA),
    "enginePool.keda.serverAddress": Case(
        value="http://p:1", at=(*SCALED, "triggers", 0, "metadata", "serverAddress"), also=WITH_QUERY
    ),
    "enginePool.keda.query": Case(value="vector(1)", at=(*SCALED, "triggers", 0, "metadata", "query"), also=WITH_QUERY),
    "enginePool.keda.trigger": Case(value="prometheus", at=(*SCALED, "triggers", 0, "type"), also=WITH_KEDA),
    "enginePool.keda.target": Case(
        value=3, at=(*SCALED, "triggers", 0, "metadata", "target"), expected="3", also=WITH_KEDA
    ),
    "enginePool.keda.sessionTarget": Case(
        value=0.9,
        at=(*SCALED, "triggers", 1, "metadata", "threshold"),
        expected="0.9",
        also={**WITH_KEDA, "gateway.sessionAdmission.mode": "wait"},
    ),
    "enginePool.keda.cooldownSeconds": Case(value=5, at=(*SCALED, "cooldownPeriod"), also=WITH_KEDA),
    "enginePool.volumes": Case(
        value=[{"name": "x", "emptyDir": {}}], at=(*ENGINE_POD, "volumes"), contains={"name": "x", "emptyDir": {}}
    ),
    "enginePool.volumeMounts": Case(
        value=[{"name": "tmp", "mountPath": "/x"}], at=(*ENGINE, "volumeMounts"),
        contains={"name": "tmp", "mountPath": "/x"},
    ),
    "enginePool.envFrom": Case(value=[{"configMapRef": {"name": "settings"}}], at=(*ENGINE, "envFrom")),
    "enginePool.podLabels": Case(value={"a": "b"}, at=(*ENGINE_POD[:4], "metadata", "labels", "a"), expected="b"),
    "enginePool.initContainers": Case(value=[INIT], at=(*ENGINE_POD, "initContainers"), contains=INIT),
    "enginePool.priorityClassName": Case(value="high", at=(*ENGINE_POD, "priorityClassName")),
    "enginePool.schedulerName": Case(value="volcano", at=(*ENGINE_POD, "schedulerName")),
    "enginePool.podSecurityContext": Case(
        value={"runAsUser": 7, "runAsGroup": None, "fsGroup": None}, at=(*ENGINE_POD, "securityContext"),
        expected={"runAsNonRoot": True, "runAsUser": 7, "seccompProfile": {"type": "RuntimeDefault"}},
    ),
    "enginePool.securityContext": Case(
        value={"readOnlyRootFilesystem": False, "capabilities": None}, at=(*ENGINE, "securityContext"),
        expected={"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": False},
    ),
    "enginePool.serviceAccountName": Case(value="reader", at=(*ENGINE_POD, "serviceAccountName")),
    "enginePool.podAnnotations": Case(value={"a": "b"}, at=(*ENGINE_POD[:4], "metadata", "annotations")),
    "enginePool.runtimeClassName": Case(value="nvidia", at=(*ENGINE_POD, "runtimeClassName")),
    "enginePool.nodeSelector": Case(value={"gpu": "h100"}, at=(*ENGINE_POD, "nodeSelector")),
    "enginePool.tolerations": Case(value=[{"operator": "Exists"}], at=(*ENGINE_POD, "tolerations")),
    "enginePool.affinity": Case(value={"nodeAffinity": {}}, at=(*ENGINE_POD, "affinity")),
    "enginePool.topologySpreadConstraints": Case(
        value=[{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        at=(*ENGINE_POD, "topologySpreadConstraints", 0, "labelSelector", "matchLabels", "proa/pool"),
        expected="builtin",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", CASES)
def test_a_pool_value_changes_its_object(path: str) -> None:
    CASES[path].check(path)
