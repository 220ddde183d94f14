"""Pools whose engines have several pods: one LeaderWorkerSet a pool, one group of pods an engine."""

from typing import Any

import kubernetes_validate
import pytest

from proa.options import from_arguments
from proa_engine.cli import make_parser
from proa_engine.server.options import ServeOptions
from support.chart import (
    ENGINE_POD,
    GROUP,
    LEADER,
    SIDECAR,
    TWO_NODES,
    WORKER,
    Objects,
    lookup,
    needs_helm,
    render,
    template,
)

pytestmark = needs_helm
BIG = {
    "enginePool.model": "org/big",
    "enginePool.tensorParallelSize": 8,
    "enginePool.pipelineParallelSize": 2,
    "enginePool.nodes": 4,
}
HOST_CACHE = {"enginePool.hostCache.sizeGb": 1}
ON_GPUS = {**BIG, "enginePool.gpu.allocation": "devicePlugin"}


def container(objects: Objects, template: tuple[str, ...]) -> Any:
    (found,) = lookup(objects, *template, "containers")
    return found


def labels(objects: Objects, template: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = lookup(objects, *template[:-1], "metadata", "labels")
    return found


def option(arguments: list[str], flag: str) -> str:
    (found,) = [each for each in arguments if each.startswith(f"{flag}=")]
    return found.partition("=")[2]


def test_a_pool_with_nodes_is_a_leader_worker_set_and_no_deployment() -> None:
    objects = render({**TWO_NODES, "enginePool.replicas": 3})
    assert ENGINE_POD[:2] not in objects
    spec = lookup(objects, *GROUP)
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (3, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert GROUP[:2] not in render()


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_pods_of_a_group_are_valid_kubernetes(version: str) -> None:
    objects = render({**ON_GPUS, "tls.existingSecret": "certs"}, f"--kube-version={version}")
    for path in (LEADER, WORKER):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": lookup(objects, *path)}
        kubernetes_validate.validate(pod, version, strict=True)


def test_the_pods_of_a_group_differ_by_their_node_rank_alone() -> None:
    objects = render({**TWO_NODES, "engine.masterPort": 29999, "tls.existingSecret": "certs"})
    leader, worker = (container(objects, path) for path in (LEADER, WORKER))
    for found, node_rank in ((leader, "0"), (worker, "$(LWS_WORKER_INDEX)")):
        assert option(found["args"], "--nnodes") == "2"
        assert option(found["args"], "--node-rank") == node_rank
        assert option(found["args"], "--master-addr") == "$(LWS_LEADER_ADDRESS)"
        assert option(found["args"], "--master-port") == "29999"
    assert [each for each in leader["args"] if each not in worker["args"]] == ["--node-rank=0"]
    assert "--tls-cert=/etc/proa/tls/tls.crt" in worker["args"]
    for key in ("image", "env", "resources", "volumeMounts", "securityContext"):
        assert leader[key] == worker[key]


def test_the_engine_accepts_the_arguments_of_both_pods() -> None:
    objects = render(TWO_NODES)
    for path in (LEADER, WORKER):
        arguments = [each.replace("$(LWS_WORKER_INDEX)", "1") for each in container(objects, path)["args"]]
        config = from_arguments(ServeOptions, make_parser().parse_args(arguments)).config
        assert (config.parallel.nnodes, config.parallel.node_rank) == (2, 0 if path == LEADER else 1)


def test_only_leaders_serve() -> None:
    objects = render(TWO_NODES)
    leader, worker = (container(objects, path) for path in (LEADER, WORKER))
    assert {port["name"] for port in leader["ports"]} == {"grpc", "metrics", "health"}
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= leader.keys()
    assert not {"ports", "startupProbe", "livenessProbe", "readinessProbe"} & worker.keys()
    for service in ("proa-engine", "proa-engine-builtin"):
        selector = lookup(objects, "Service", service, "spec", "selector")
        assert selector.items() <= labels(objects, LEADER).items()
        assert not selector.items() <= labels(objects, WORKER).items()


def test_prometheus_scrapes_leaders_only() -> None:
    objects = render({**TWO_NODES, "monitoring.enabled": True})
    selector = lookup(objects, "PodMonitor", "proa-engine", "spec", "selector", "matchLabels")
    assert selector.items() <= labels(objects, LEADER).items()
    assert not selector.items() <= labels(objects, WORKER).items()


def test_an_eviction_counts_every_pod_of_the_pool() -> None:
    objects = render(TWO_NODES)
    selector = lookup(objects, "PodDisruptionBudget", "proa-engine-builtin", "spec", "selector", "matchLabels")
    for path in (LEADER, WORKER):
        assert selector.items() <= labels(objects, path).items()


def test_the_pods_of_a_group_are_spread_over_nodes() -> None:
    objects = render(TWO_NODES)
    for path in (LEADER, WORKER):
        (constraint,) = lookup(objects, *path, "topologySpreadConstraints")
        assert constraint["labelSelector"]["matchLabels"].items() <= labels(objects, path).items()
        assert constraint["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-key"]


def test_own_match_label_keys_of_a_spread_constraint_are_kept() -> None:
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "matchLabelKeys": ["mine"]}
    (constraint,) = lookup(
        render({**TWO_NODES, "enginePool.topologySpreadConstraints": [spread]}), *LEADER, "topologySpreadConstraints"
    )
    assert constraint["matchLabelKeys"] == ["mine"]


def test_each_pod_has_the_gpus_and_the_memory_of_its_own_ranks() -> None:
    objects = render(ON_GPUS)
    for path in (LEADER, WORKER):
        assert container(objects, path)["resources"] == {
            "limits": {"nvidia.com/gpu": 4},
            "requests": {"cpu": "8", "memory": "32Gi"},
        }


def test_the_gpu_claim_of_a_pod_is_for_its_own_ranks() -> None:
    objects = render({**BIG, "enginePool.gpu.allocation": "dra"}, "--kube-version=1.35")
    ((name, claim),) = [(name, found) for (kind, name), found in objects.items() if kind == "ResourceClaimTemplate"]
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["count"] == 4
    for path in (LEADER, WORKER):
        assert lookup(objects, *path, "resourceClaims") == [{"name": "gpus", "resourceClaimTemplateName": name}]


def test_host_memory_is_divided_over_the_pods() -> None:
    objects = render({**ON_GPUS, "enginePool.hostCache.sizeGb": 40})
    assert container(objects, WORKER)["resources"]["requests"]["memory"] == f"{32 + 40 // 4}Gi"


def test_pods_of_a_pool_connect_to_each_other_on_any_port() -> None:
    objects = render({**TWO_NODES, "engines.other": {}})
    spec = lookup(objects, "NetworkPolicy", "proa-engine-builtin-nodes", "spec")
    ((peer,),) = [rule["from"] for rule in spec["ingress"]]
    assert "ports" not in spec["ingress"][0]
    assert spec["egress"][0] == {"to": [peer]}
    assert spec["egress"][1:] == lookup(objects, "NetworkPolicy", "proa-engine", "spec", "egress")
    other = lookup(objects, "Deployment", "proa-engine-other", "spec", "template", "metadata", "labels")
    for selector in (peer["podSelector"]["matchLabels"], spec["podSelector"]["matchLabels"]):
        assert selector.items() <= labels(objects, LEADER).items()
        assert selector.items() <= labels(objects, WORKER).items()
        assert not selector.items() <= other.items()
    assert ("NetworkPolicy", "proa-engine-other-nodes") not in objects


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("HorizontalPodAutoscaler", {"enginePool.autoscaling.enabled": True}),
        ("ScaledObject", {"enginePool.keda.enabled": True, "enginePool.keda.minReplicas": 1}),
    ],
)
def test_autoscalers_scale_the_number_of_groups(kind: str, values: dict[str, Any]) -> None:
    objects = render({**TWO_NODES, **values})
    target = lookup(objects, kind, "proa-engine-builtin", "spec", "scaleTargetRef")
    workload = lookup(objects, target["kind"], target["name"])
    assert (target["apiVersion"], target["kind"]) == (workload["apiVersion"], "LeaderWorkerSet")
    assert "replicas" not in workload["spec"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"enginePool.nodes": 3, "enginePool.tensorParallelSize": 2},
            "nodes 3 does not divide the engine's ranks, tensorParallelSize 2 times pipelineParallelSize 1",
        ),
        (
            {**TWO_NODES, **SIDECAR},
            "tensorParallel.mode sidecar cannot work with nodes 2: each pod starts its own ranks",
        ),
        (
            {**TWO_NODES, "enginePool.hostCache": {"sizeGb": 1, "survivesRestart": True}},
            "hostCache.survivesRestart cannot work with nodes 2 and pipelineParallelSize 1: engines with several of",
        ),
        (
            {**TWO_NODES, **HOST_CACHE, "enginePool.diskCache.sizeGb": 1},
            "diskCache.sizeGb cannot work with nodes 2",
        ),
        (
            {**TWO_NODES, **HOST_CACHE, "enginePool.kvTransfer.enabled": True},
            "kvTransfer.enabled cannot work with nodes",
        ),
        (
            {**HOST_CACHE, "enginePool.pipelineParallelSize": 2, "enginePool.kvTransfer.enabled": True},
            "kvTransfer.enabled cannot work with nodes 1 and pipelineParallelSize 2",
        ),
        (
            {**TWO_NODES, "fullnameOverride": "a" * 35},
            "which is longer than 48 characters; shorten the pool's name or set fullnameOverride",
        ),
        ({**TWO_NODES, "engines.builtin-0": {}}, "pool builtin-0 has the name of a group of this pool"),
        ({**TWO_NODES, "engine.masterPort": 9400}, "engine.masterPort 9400 is another port of the pod"),
        ({"enginePool.extraArgs": ["--nnodes=2"]}, "extraArgs contains --nnodes, which the chart sets"),
    ],
)
def test_values_that_cannot_work_over_nodes_are_rejected(values: dict[str, Any], sentence: str) -> None:
    done = template(values)
    assert done.returncode != 0
    assert sentence in done.stderr


def test_nodes_are_rejected_on_a_cluster_without_leader_worker_sets() -> None:
    assert (
        "nodes 2 requires leaderworkerset.x-k8s.io/v1, which the cluster does not have; install the LeaderWorkerSet "
        "controller (helm template needs --api-versions=leaderworkerset.x-k8s.io/v1)"
    ) in template(TWO_NODES, custom_api="").stderr
    assert template({}, custom_api="").returncode == 0
