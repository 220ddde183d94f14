"""What the chart promises of the objects that it renders."""

import json
from typing import Any

import kubernetes_validate
import pytest

from support.chart import (
    CLAIMED,
    COMBINATIONS,
    ENGINE,
    ENGINE_POD,
    GATEWAY,
    GATEWAY_POD,
    GPUS,
    SIDECAR,
    Objects,
    lookup,
    needs_helm,
    render,
)

pytestmark = needs_helm
EVERYTHING = COMBINATIONS["optional"]


def engine_pod(values: dict[str, Any] | None = None) -> Any:
    return lookup(render(values), *ENGINE_POD)


def containers(objects: Objects) -> list[Any]:
    """Every container of every Deployment."""
    pods = [found["spec"]["template"]["spec"] for (kind, _), found in objects.items() if kind == "Deployment"]
    return [container for pod in pods for container in pod["containers"] + pod.get("initContainers", [])]


@pytest.mark.parametrize("version", ["1.30", "1.32", "1.34", "1.35", "1.37"])
def test_every_object_is_valid_kubernetes(version: str) -> None:
    for name, values in COMBINATIONS.items():
        if name == "claimed" and version < "1.34":
            continue  # refused, see the refusals
        for document in render(values, f"--kube-version={version}").values():
            kubernetes_validate.validate(document, version, strict=True)


def test_defaults_serve_the_builtin_model_with_one_pod_each() -> None:
    objects = render()
    assert lookup(objects, *ENGINE_POD[:3], "replicas") == 1
    arguments = lookup(objects, *ENGINE, "args")
    assert {"--model=builtin", "--tensor-parallel-size=1", "--device=cpu"} <= set(arguments)
    assert "--engine-service=proa-engine.here:50051" in lookup(objects, *GATEWAY, "args")
    assert {kind for kind, _ in objects} == {
        *("Deployment", "Service", "ServiceAccount", "Role", "RoleBinding"),
        *("NetworkPolicy", "PodDisruptionBudget", "Pod"),
    }


def test_every_container_is_confined() -> None:
    objects = render({**EVERYTHING, **SIDECAR})
    for pod in (GATEWAY_POD, ENGINE_POD):
        assert lookup(objects, *pod, "securityContext", "runAsNonRoot")
        assert lookup(objects, *pod, "securityContext", "seccompProfile") == {"type": "RuntimeDefault"}
    for container in containers(objects):
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]


def test_role_reads_endpoint_slices_and_nothing_else() -> None:
    assert lookup(render(), "Role", "proa-gateway", "rules") == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]


def test_the_role_is_bound_to_an_account_that_was_there_before() -> None:
    objects = render({"serviceAccount.create": False, "serviceAccount.name": "ours"})
    assert ("ServiceAccount", "ours") not in objects
    assert ("Role", "proa-gateway") in objects
    assert lookup(objects, "RoleBinding", "proa-gateway", "subjects") == [
        {"kind": "ServiceAccount", "name": "ours", "namespace": "here"}
    ]


def test_a_label_is_text_even_if_it_looks_like_something_else() -> None:
    for name in ("1", "on", "1e3"):
        deployment = lookup(render({"engines": {name: {}}}), "Deployment", f"proa-engine-{name}")
        for holder in (deployment["metadata"]["labels"], deployment["spec"]["selector"]["matchLabels"]):
            assert holder["proa/pool"] == name


def test_the_charts_own_labels_win_over_the_users() -> None:
    objects = render({"commonLabels": {"app.kubernetes.io/component": "mine", "team": "sea"}})
    labels = lookup(objects, "Deployment", "proa-gateway", "metadata", "labels")
    assert (labels["app.kubernetes.io/component"], labels["team"]) == ("gateway", "sea")


def test_pools_of_one_model_may_share_its_name() -> None:
    objects = render({"engines": {"spot": {"model": "builtin"}}})
    arguments = lookup(objects, *GATEWAY, "args")
    assert [each for each in arguments if each.startswith("--model=")] == ["--model=proa-builtin"]


def test_grpc_clients_find_the_ready_engines_of_each_pool() -> None:
    objects = render({"engines": {"big": {"model": "org/big"}}})
    for pool in ("builtin", "big"):
        service = lookup(objects, "Service", f"proa-engine-{pool}", "spec")
        assert service["selector"]["proa/pool"] == pool
        assert not service.get("publishNotReadyAddresses", False)
    assert lookup(objects, "Service", "proa-engine", "spec", "publishNotReadyAddresses")


def test_a_limit_that_a_pool_takes_away_is_gone() -> None:
    values = {"enginePool.resources": {"limits": {"memory": None}}, "gateway.resources": {"limits": {"cpu": None}}}
    objects = render(values)
    assert lookup(objects, *ENGINE, "resources")["limits"] == {}
    assert lookup(objects, *GATEWAY, "resources")["limits"] == {"memory": "1Gi"}


def test_half_of_a_rolling_update_keeps_the_other_half_of_the_defaults() -> None:
    objects = render({"enginePool.rollingUpdate": {"maxUnavailable": 1}})
    update = lookup(objects, *ENGINE_POD[:3], "strategy", "rollingUpdate")
    assert update == {"maxUnavailable": 1, "maxSurge": 1}


def test_large_numbers_are_written_out() -> None:
    values = {"gateway.maxQueuedTokens": 10**9, "gateway.maxConcurrentRequests": 10**6}
    assert {"--max-queued-tokens=1000000000", "--max-concurrent-requests=1000000"} <= set(
        lookup(render(values), *GATEWAY, "args")
    )


def test_shared_memory_is_a_memory_volume_in_every_engine_container() -> None:
    pod = engine_pod(SIDECAR)
    (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    for container in pod["containers"] + pod["initContainers"]:
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_sidecar_mode_makes_one_restartable_container_a_rank() -> None:
    pod = engine_pod({**SIDECAR, "enginePool.model": "org/big", "enginePool.tensorParallelSize": 4})
    assert [container["name"] for container in pod["initContainers"]] == [f"tp-worker-{rank}" for rank in (1, 2, 3)]
    assert all(container["restartPolicy"] == "Always" for container in pod["initContainers"])
    sockets = [argument for argument in pod["containers"][0]["args"] if argument.startswith("--worker-socket=")]
    assert sockets == [f"--worker-socket=/run/proa/rank-{rank}.sock" for rank in (1, 2, 3)]


def test_process_mode_makes_no_worker_container() -> None:
    pod = engine_pod(GPUS)
    assert "initContainers" not in pod
    assert not any(argument.startswith("--worker-socket") for argument in pod["containers"][0]["args"])


def test_a_device_plugin_gives_the_container_a_gpu_for_every_rank() -> None:
    pod = engine_pod(GPUS)
    (engine,) = pod["containers"]
    assert engine["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 2}
    assert "--device=cuda" in engine["args"]
    assert not engine["securityContext"]["readOnlyRootFilesystem"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert "resourceClaims" not in pod


def test_one_claim_is_shared_by_every_container_of_the_pod() -> None:
    objects = render(CLAIMED)
    pod = lookup(objects, *ENGINE_POD)
    ((name, template),) = [(name, found) for (kind, name), found in objects.items() if kind == "ResourceClaimTemplate"]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 2}
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": name}]
    for container in pod["containers"] + pod["initContainers"]:
        assert container["resources"]["claims"] == [{"name": "gpus"}]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert pod["shareProcessNamespace"]
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


def test_a_claim_template_that_says_something_else_has_another_name() -> None:
    names = {
        name
        for size in (1, 2)
        for kind, name in render({**CLAIMED, "enginePool.tensorParallelSize": size})
        if kind == "ResourceClaimTemplate"
    }
    assert len(names) == 2


def test_the_gateway_knows_the_name_of_every_pools_model_from_the_start() -> None:
    arguments = lookup(render({"engines": {"big": {"model": "org/big"}}}), *GATEWAY, "args")
    assert [each for each in arguments if each.startswith("--model=")] == ["--model=org/big", "--model=proa-builtin"]


def test_autoscaling_counts_what_waits_in_engines_and_before_them() -> None:
    objects = render({"enginePool.autoscaling.enabled": True})
    engines, gateways = lookup(objects, "HorizontalPodAutoscaler", "proa-engine-builtin", "spec", "metrics")
    target = {"type": "AverageValue", "averageValue": "4"}
    assert engines["pods"] == {"metric": {"name": "vllm_num_requests_waiting"}, "target": target}
    assert gateways["object"]["describedObject"]["name"] == "proa-gateway"
    assert gateways["object"]["metric"]["selector"] == {"matchLabels": {"model": "proa-builtin"}}
    assert gateways["object"]["target"] == target


def test_probes_ask_for_loaded_alive_and_ready_separately() -> None:
    engine = lookup(render(), *ENGINE)
    assert engine["startupProbe"]["grpc"]["service"] == "startup"
    assert engine["livenessProbe"]["grpc"]["service"] == "liveness"
    assert "service" not in engine["readinessProbe"]["grpc"]
    ports = {engine[f"{name}Probe"]["grpc"]["port"] for name in ("startup", "liveness", "readiness")}
    assert {f"--health-port={port}" for port in ports} < set(engine["args"])


def test_updates_keep_capacity_by_default() -> None:
    for name in ("proa-gateway", "proa-engine-builtin"):
        update = lookup(render(), "Deployment", name, "spec", "strategy", "rollingUpdate")
        assert update == {"maxUnavailable": 0, "maxSurge": 1}


def test_the_grace_period_covers_the_drain_and_what_comes_before_it() -> None:
    pod = lookup(render({"gateway.terminationGracePeriodSeconds": 60, "gateway.preStopSeconds": 30}), *GATEWAY_POD)
    assert "--drain-timeout=60" in pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > 60 + 30


def test_pools_take_what_they_leave_out_from_the_pool_defaults() -> None:
    objects = render({"engines": {"big": {"model": "org/big", "replicas": 3}}}, "--set=enginePool.drainSeconds=100")
    big = lookup(objects, "Deployment", "proa-engine-big", "spec")
    assert big["replicas"] == 3
    assert big["template"]["spec"]["terminationGracePeriodSeconds"] == 115
    assert "--model=org/big" in big["template"]["spec"]["containers"][0]["args"]
    assert ("Deployment", "proa-engine-builtin") in objects


def test_a_pool_may_say_false_where_the_defaults_say_true() -> None:
    assert not any(kind == "PodDisruptionBudget" and "engine" in name
                   for kind, name in render({"enginePool.podDisruptionBudget.enabled": False}))  # fmt: skip


def test_the_builtin_pool_can_be_left_out() -> None:
    objects = render({"engines": {"builtin": None, "big": {"model": "org/big"}}})
    deployments = {name for kind, name in objects if kind == "Deployment"}
    assert deployments == {"proa-gateway", "proa-engine-big"}


@pytest.mark.parametrize("scaler", ["autoscaling", "keda"])
def test_whoever_scales_a_pool_alone_sets_its_replicas(scaler: str) -> None:
    held = {"gateway.scaleFromZero.timeoutSeconds": 60}
    spec = lookup(render({f"enginePool.{scaler}.enabled": True, **held}), *ENGINE_POD[:3])
    assert "replicas" not in spec


def test_keda_counts_a_models_requests_that_are_held_wait_or_run_in_its_release() -> None:
    values = {"enginePool.keda.enabled": True, "enginePool.keda.minReplicas": 1, "enginePool.servedModelName": "fast"}
    (trigger,) = lookup(render(values), "ScaledObject", "proa-engine-builtin", "spec", "triggers")
    release = 'namespace="here",app_kubernetes_io_instance="proa"'
    assert trigger["metadata"]["query"] == (
        f'sum(proa_gateway_queue_depth{{model="fast",{release}}} or vector(0))'
        f' + sum(vllm:num_requests_waiting{{model_name="fast",engine="0",{release}}} or vector(0))'
        f' + sum(vllm:num_requests_running{{model_name="fast",engine="0",{release}}} or vector(0))'
    )


def test_otel_variables_reach_every_container() -> None:
    for container in containers(render({**SIDECAR, "otel.OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"})):
        names = {variable["name"] for variable in container["env"]}
        assert {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME"} <= names


def test_dashboards_are_json_in_one_config_map() -> None:
    data = lookup(render({"dashboards.enabled": True}), "ConfigMap", "proa-dashboards", "data")
    assert {json.loads(text)["uid"] for text in data.values()} == {"proa-gateway", "proa-engines"}


def test_both_sides_show_the_same_certificate() -> None:
    objects = render({"tls.existingSecret": "certs"})
    for container in (lookup(objects, *GATEWAY), lookup(objects, *ENGINE)):
        flags = [argument for argument in container["args"] if argument.startswith("--tls-")]
        assert flags == [f"--tls-{key}=/etc/proa/tls/{file}" for key, file in
                         (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))]  # fmt: skip
        assert {"name": "tls", "mountPath": "/etc/proa/tls", "readOnly": True} in container["volumeMounts"]
