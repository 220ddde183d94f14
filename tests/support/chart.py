"""Render the chart with Helm and look up values in the objects."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "proa"
HELM = shutil.which("helm", path=str(ROOT / ".tools" / "bin")) or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None and "CI" not in os.environ, reason="helm is not installed")

Objects = dict[tuple[str, str], Any]  # (kind, name) -> object
GATEWAY_POD = ("Deployment", "proa-gateway", "spec", "template", "spec")
GATEWAY = (*GATEWAY_POD, "containers", 0)
ENGINE_POD = ("Deployment", "proa-engine-builtin", "spec", "template", "spec")
ENGINE = (*ENGINE_POD, "containers", 0)

GPUS = {"enginePool.gpu.allocation": "devicePlugin", "enginePool.tensorParallelSize": 2}
SIDECAR = {"enginePool.tensorParallelSize": 2, "enginePool.tensorParallel.mode": "sidecar"}
CLAIMED = {**SIDECAR, "enginePool.gpu.allocation": "dra"}
LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io/v1"
TWO_NODES = {"enginePool.nodes": 2, "enginePool.tensorParallelSize": 2}
GROUP = ("LeaderWorkerSet", "proa-engine-builtin", "spec")
LEADER = (*GROUP, "leaderWorkerTemplate", "leaderTemplate", "spec")
WORKER = (*GROUP, "leaderWorkerTemplate", "workerTemplate", "spec")
OPTIONAL = {
    "enginePool.lora.enabled": True,
    "enginePool.lora.maxCpuLoras": 8,
    "enginePool.lora.modules": [{"name": "sql", "path": "/adapters/sql"}],
    "enginePool.lora.volume.claimName": "adapters",
    "enginePool.images.languageModelOnly": True,
    "enginePool.images.encoderCacheSize": 4096,
    "gateway.images.allowedMediaDomains": ["cats.example", "dogs.example"],
    "image.pullSecrets": ["login"],
    "commonLabels": {"team": "sea"},
    "gateway.ingress.enabled": True,
    "gateway.ingress.hosts": ["llm.example", "chat.example"],
    "gateway.ingress.tls": [{"hosts": ["llm.example"], "secretName": "cert"}],
    "gateway.apiKeys.existingSecret": "keys",
    "gateway.podDisruptionBudget.maxUnavailable": "50%",
    "gateway.autoscaling.enabled": True,
    "tls.existingSecret": "certs",
    "dashboards.enabled": True,
    "otel.OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
    "networkPolicy.engine.from": [{"namespaceSelector": {"matchLabels": {"clients": "yes"}}}],
    "networkPolicy.gateway.from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.metrics.from": [{"podSelector": {"matchLabels": {"app": "prometheus"}}}],
    "engines.other": {"model": "/models/big", "modelVolume": {"claimName": "weights"}, "replicas": 2},
}
EXCHANGE = {"hostCache": {"sizeGb": 1}, "kvTransfer": {"enabled": True}}
PREFILL_AND_DECODE = {  # with every tier of the KV cache
    "tls.existingSecret": "certs",
    "gateway.podDeletionCost": True,
    "engines.prompts": {**EXCHANGE, "role": "prefill", "replicas": 2, "autoscaling": {"enabled": True}},
    "engines.answers": {
        "role": "decode",
        "autoscaling": {"enabled": True},
        "kvTransfer": {"enabled": True},
        "hostCache": {"sizeGb": 1, "survivesRestart": True},
        "diskCache": {"sizeGb": 10},
    },
}
SCALED = {
    "enginePool.autoscaling.enabled": True,
    "enginePool.huggingFace.tokenSecret": "hub",
    "enginePool.model": "org/big",
    "enginePool.huggingFace.newClaim.size": "9Gi",
    "enginePool.nodeSelector": {"gpu": "h100"},
    "enginePool.runtimeClassName": "nvidia",
    "enginePool.affinity": {"podAntiAffinity": {}},
    "enginePool.rollingUpdate": {"maxUnavailable": "25%", "maxSurge": 0},
}
# Typical installations. Together they render every kind of object that needs no CRD.
COMBINATIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gpus": GPUS,
    "sidecars": SIDECAR,
    "claimed": CLAIMED,
    "optional": OPTIONAL,
    "prefill and decode": PREFILL_AND_DECODE,
    "scaled": SCALED,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A chart value, and what it changes at a path of one object."""

    value: Any
    at: tuple[str | int, ...]  # kind, name, keys and indices
    expected: Any = None  # None: equal to the value
    contains: Any = None  # instead of `expected`: an item of the list found there
    also: Mapping[str, Any] = field(default_factory=dict)  # further values that this one requires

    def check(self, path: str) -> None:
        found = lookup(render({**self.also, path: self.value}), *self.at)
        if self.contains is not None:
            assert self.contains in found
        else:
            assert found == (self.value if self.expected is None else self.expected)


def template(
    values: Mapping[str, Any] | None = None, *flags: str, custom_api: str = LEADER_WORKER_SETS
) -> subprocess.CompletedProcess[str]:
    """Run `helm template` with values by dotted path; `enginePool.X` sets `engines.builtin.X`. The cluster has
    `custom_api` besides Kubernetes' own APIs, or none if it is empty."""
    nested: dict[str, Any] = {}
    for path, value in (values or {}).items():
        *parents, last = path.replace("enginePool.", "engines.builtin.", 1).split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return _template(json.dumps(nested), (*flags, *([f"--api-versions={custom_api}"] if custom_api else [])))


@cache
def _template(values: str, flags: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), "template", "proa", str(CHART), "--namespace", "here", "--values", "-", *flags]
    environment = os.environ | {"GOGC": "off"}  # Go's garbage collector takes a third of the time, for some megabytes
    return subprocess.run(command, input=values, env=environment, capture_output=True, text=True, check=False)


def render(values: Mapping[str, Any] | None = None, *flags: str) -> Objects:
    done = template(values, *flags)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


@cache
def parse(text: str) -> Objects:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents = [document for document in yaml.load_all(text, loader) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def lookup(objects: Objects, kind: str | int, name: str | int, *path: str | int) -> Any:
    found = objects[str(kind), str(name)]
    for key in path:
        found = found[key]
    return found
