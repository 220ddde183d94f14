"""Pools: ranks, GPUs, scaling, and the defaults that they share."""

import json
from typing import Any

import pytest

from proa_engine.cli import make_parser
from support.chart import CLAIMED, ENGINE, ENGINE_POD, GATEWAY, GATEWAY_POD, GPUS, SIDECAR, lookup, needs_helm, render

pytestmark = needs_helm


def engine_pod(values: dict[str, Any] | None = None) -> Any:
    return lookup(render(values), *ENGINE_POD)


def test_pools_of_one_model_may_share_its_name() -> None:
    objects = render({"engines": {"spot": {"model": "builtin"}}})
    arguments = lookup(objects, *GATEWAY, "args")
    assert [each for each in arguments if each.startswith("--model=")] == ["--model=proa-builtin"]


def test_the_gateway_knows_the_adapters_of_all_pools() -> None:
    lora = {"enabled": True, "modules": [{"name": "sql", "path": "/adapters/sql"}]}
    objects = render({"engines": {"builtin": {}, "big": {"model": "org/big", "lora": lora}}, "gateway.extraArgs": []})
    arguments = lookup(objects, *GATEWAY, "args")
    modules = [json.loads(each.removeprefix("--lora-modules=")) for each in arguments if "--lora-modules" in each]
    assert modules == [{"name": "sql", "path": "/adapters/sql", "base_model_name": "org/big"}]
    assert "--enable-lora" not in lookup(objects, *ENGINE, "args")


def test_the_containers_of_all_ranks_keep_compiled_kernels_at_the_same_path() -> None:
    pod = engine_pod({**SIDECAR, "enginePool.compileCache.claimName": "kernels"})
    (engine,) = pod["containers"]
    assert "--compile-cache=/compile-cache" in engine["args"]
    for container in (engine, *pod["initContainers"]):
        assert {"name": "compile-cache", "mountPath": "/compile-cache"} in container["volumeMounts"]


def test_grpc_clients_find_the_ready_engines_of_each_pool() -> None:
    objects = render({"engines": {"builtin": {}, "big": {"model": "org/big"}}})
    for pool in ("builtin", "big"):
        service = lookup(objects, "Service", f"proa-engine-{pool}", "spec")
        assert service["selector"]["proa/pool"] == pool
        assert not service.get("publishNotReadyAddresses", False)
    assert lookup(objects, "Service", "proa-engine", "spec", "publishNotReadyAddresses")


def test_a_memory_limit_replaces_the_default_request() -> None:
    for values, limits in (({}, {}), (GPUS, {"nvidia.com/gpu": 2})):
        objects = render({**values, "enginePool.resources": {"limits": {"memory": "6Gi"}}})
        resources = lookup(objects, *ENGINE, "resources")
        assert resources["limits"] == {"memory": "6Gi", **limits}
        assert resources["requests"].keys() == {"cpu"}  # Kubernetes requests the limit


def test_each_gpu_worker_container_has_memory_for_its_own_rank() -> None:
    pod = engine_pod(CLAIMED)
    for container in pod["containers"] + pod["initContainers"]:
        assert container["resources"]["requests"] == {"cpu": "2", "memory": "8Gi"}


def test_null_removes_a_default_resource_limit() -> None:
    values = {"enginePool.resources": {"limits": {"memory": None}}, "gateway.resources": {"limits": {"cpu": None}}}
    objects = render(values)
    assert lookup(objects, *ENGINE, "resources")["limits"] == {}
    assert lookup(objects, *GATEWAY, "resources")["limits"] == {"memory": "3Gi"}


def test_a_partial_rolling_update_keeps_the_other_default() -> None:
    objects = render({"enginePool.rollingUpdate": {"maxUnavailable": 1}})
    update = lookup(objects, *ENGINE_POD[:3], "strategy", "rollingUpdate")
    assert update == {"maxUnavailable": 1, "maxSurge": 1}


def test_shared_memory_is_a_memory_volume_in_every_engine_container() -> None:
    pod = engine_pod(SIDECAR)
    (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    for container in pod["containers"] + pod["initContainers"]:
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_sidecar_mode_runs_each_further_rank_in_a_restartable_container() -> None:
    pod = engine_pod({**SIDECAR, "enginePool.tensorParallelSize": 4})
    assert [container["name"] for container in pod["initContainers"]] == [f"tp-worker-{rank}" for rank in (1, 2, 3)]
    assert all(container["restartPolicy"] == "Always" for container in pod["initContainers"])
    sockets = [argument for argument in pod["containers"][0]["args"] if argument.startswith("--worker-socket=")]
    assert sockets == [f"--worker-socket=/run/proa/rank-{rank}.sock" for rank in (1, 2, 3)]


def test_each_rank_of_each_pipeline_stage_has_a_container() -> None:
    pod = engine_pod({**SIDECAR, "enginePool.pipelineParallelSize": 2})
    assert [container["name"] for container in pod["initContainers"]] == [f"tp-worker-{rank}" for rank in (1, 2, 3)]
    for container in pod["containers"] + pod["initContainers"]:
        assert {"--tensor-parallel-size=2", "--pipeline-parallel-size=2"} <= set(container["args"])
        make_parser().parse_args(container["args"])


def test_a_model_of_the_hub_is_downloaded_before_the_engine_starts() -> None:
    extra = ["--revision", "v2"]
    pod = engine_pod({**SIDECAR, "enginePool.model": "org/big", "enginePool.extraArgs": extra})
    download, worker = pod["initContainers"]
    assert (download["name"], worker["name"]) == ("download", "tp-worker-1")
    assert download["args"][0] == "download"
    assert set(download["args"][1:]) < set(pod["containers"][0]["args"])
    assert {"--model=org/big", *extra} < set(download["args"])
    assert {"name": "cache", "mountPath": "/cache"} in download["volumeMounts"]
    make_parser().parse_args(download["args"])


def test_a_gguf_file_of_the_hub_is_downloaded_before_the_engine_starts() -> None:
    (download,) = engine_pod({"enginePool.model": "org/big-GGUF:Q4_K_M"})["initContainers"]
    assert "--model=org/big-GGUF:Q4_K_M" in download["args"]
    make_parser().parse_args(download["args"])


@pytest.mark.parametrize("model", ["s3://bucket/big", "gs://bucket/big", "az://container/big", "abfss://c@a.host/big"])
def test_a_model_in_an_object_store_is_downloaded_by_an_init_container(model: str) -> None:
    (download,) = engine_pod({"enginePool.model": model})["initContainers"]
    assert f"--model={model}" in download["args"]
    make_parser().parse_args(download["args"])


@pytest.mark.parametrize("model", ["builtin", "/models/big", "/models/big.gguf", "./big", "~/big", "https://host/big"])
def test_nothing_else_is_downloaded(model: str) -> None:
    assert "initContainers" not in engine_pod({"enginePool.model": model})


def test_adapters_of_the_hub_and_of_object_stores_are_downloaded_too() -> None:
    for path, downloads in (
        ("org/sql", True),
        ("s3://bucket/sql", True),
        ("/adapters/sql", False),
        ("builtin:sailor", False),
    ):
        lora = {"enabled": True, "modules": [{"name": "sql", "path": path}]}
        assert ("initContainers" in engine_pod({"enginePool.lora": lora})) is downloads


def test_a_rollout_may_take_as_long_as_a_pod_may_take_to_start() -> None:
    for model, longest in (("builtin", 600 + 1800), ("org/big", 600 + 86400)):
        spec = lookup(render({"enginePool.model": model}), *ENGINE_POD[:3])
        assert spec["progressDeadlineSeconds"] == longest


def test_process_mode_has_no_worker_container() -> None:
    pod = engine_pod(GPUS)
    assert "initContainers" not in pod
    assert not any(argument.startswith("--worker-socket") for argument in pod["containers"][0]["args"])


def test_the_engine_requests_one_device_plugin_gpu_per_rank() -> None:
    pod = engine_pod(GPUS)
    (engine,) = pod["containers"]
    assert engine["resources"] == {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"nvidia.com/gpu": 2}}
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


def test_a_changed_claim_template_has_another_name() -> None:
    names = {
        name
        for size in (1, 2)
        for kind, name in render({**CLAIMED, "enginePool.tensorParallelSize": size})
        if kind == "ResourceClaimTemplate"
    }
    assert len(names) == 2


def test_the_gateway_gets_the_model_name_of_every_pool() -> None:
    arguments = lookup(render({"engines": {"builtin": {}, "big": {"model": "org/big"}}}), *GATEWAY, "args")
    assert [each for each in arguments if each.startswith("--model=")] == ["--model=org/big", "--model=proa-builtin"]


def test_autoscaling_uses_the_engines_and_the_gateways_queues() -> None:
    objects = render({"enginePool.autoscaling.enabled": True})
    engines, gateways = lookup(objects, "HorizontalPodAutoscaler", "proa-engine-builtin", "spec", "metrics")
    target = {"type": "AverageValue", "averageValue": "4"}
    assert engines["pods"] == {"metric": {"name": "vllm_num_requests_waiting"}, "target": target}
    assert gateways["object"]["describedObject"]["name"] == "proa-gateway"
    assert gateways["object"]["metric"]["selector"] == {"matchLabels": {"model": "proa-builtin"}}
    assert gateways["object"]["target"] == target


def test_pools_inherit_from_the_pool_defaults() -> None:
    objects = render(
        {"engines": {"builtin": {}, "big": {"model": "org/big", "replicas": 3}}}, "--set=enginePool.drainSeconds=100"
    )
    big = lookup(objects, "Deployment", "proa-engine-big", "spec")
    assert big["replicas"] == 3
    assert big["template"]["spec"]["terminationGracePeriodSeconds"] == 115
    assert "--model=org/big" in big["template"]["spec"]["containers"][0]["args"]
    assert ("Deployment", "proa-engine-builtin") in objects


def test_a_pool_overrides_a_true_default_with_false() -> None:
    assert not any(kind == "PodDisruptionBudget" and "engine" in name
                   for kind, name in render({"enginePool.podDisruptionBudget.enabled": False}))  # fmt: skip


def test_the_builtin_pool_is_off_as_soon_as_another_one_is_named() -> None:
    objects = render({"engines": {"big": {"model": "org/big"}}})
    deployments = {name for kind, name in objects if kind == "Deployment"}
    assert deployments == {"proa-gateway", "proa-engine-big"}


def test_a_scaled_gateway_sets_no_replicas() -> None:
    assert "replicas" not in lookup(render({"gateway.autoscaling.enabled": True}), *GATEWAY_POD[:3])


@pytest.mark.parametrize("scaler", ["autoscaling", "keda"])
def test_a_scaled_pool_sets_no_replicas(scaler: str) -> None:
    held = {"gateway.scaleFromZero.timeoutSeconds": 60}
    spec = lookup(render({f"enginePool.{scaler}.enabled": True, **held}), *ENGINE_POD[:3])
    assert "replicas" not in spec


KEDA = {"enginePool.keda.enabled": True, "enginePool.keda.minReplicas": 1}


@pytest.mark.parametrize(("values", "first"), [({}, "proa-builtin"), ({"enginePool.servedModelName": "fast"}, "fast")])
def test_aliases_follow_the_name_that_scaling_and_gateways_use(values: dict[str, object], first: str) -> None:
    values = {**KEDA, **values, "enginePool.servedModelAliases": ["gpt-4o", "small"]}
    objects = render(values)
    names = [each for each in lookup(objects, *ENGINE, "args") if "served-model" in each]
    assert names == [f"--served-model-name={name}" for name in (first, "gpt-4o", "small")]
    (trigger,) = lookup(objects, "ScaledObject", "proa-engine-builtin", "spec", "triggers")
    assert trigger["metadata"]["model"] == first
    assert [each for each in lookup(objects, *GATEWAY, "args") if each.startswith("--model=")] == [f"--model={first}"]


def test_keda_asks_the_gateways_which_know_each_other() -> None:
    values = {**KEDA, "enginePool.servedModelName": "fast", "enginePool.keda.target": 3}
    (trigger,) = lookup(render(values), "ScaledObject", "proa-engine-builtin", "spec", "triggers")
    address = "proa-gateway-scaler.here.svc:50052"
    assert trigger == {
        "type": "external-push",
        "metadata": {"scalerAddress": address, "model": "fast", "role": "both", "target": "3"},
    }
    assert {"--scaler-port=50052", f"--scaler-peers={address}"} <= set(lookup(render(values), *GATEWAY, "args"))
    service = lookup(render(values), "Service", "proa-gateway-scaler", "spec")
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


@pytest.mark.parametrize("values", [{}, {**KEDA, "enginePool.keda.trigger": "prometheus"}])
def test_gateways_have_no_scaler_unless_keda_asks_them(values: dict[str, object]) -> None:
    objects = render(values)
    assert not [each for each in lookup(objects, *GATEWAY, "args") if "scaler" in each]
    assert ("Service", "proa-gateway-scaler") not in objects


def test_keda_adds_pods_for_what_conversations_claim_too() -> None:
    values = {
        **KEDA,
        "enginePool.servedModelName": "fast",
        "enginePool.keda.sessionTarget": 0.9,
        "gateway.sessionAdmission.mode": "wait",
    }
    by_requests, by_sessions = lookup(render(values), "ScaledObject", "proa-engine-builtin", "spec", "triggers")
    release = 'namespace="here",app_kubernetes_io_instance="proa"'
    engines = f'vllm:num_requests_running{{model_name="fast",engine="0",proa_role!="prefill",{release}}}'
    assert by_requests["type"] == "external-push"
    assert by_sessions["metadata"]["query"] == (
        f'(sum(proa_gateway_session_demand{{model_name="fast",{release}}}) or vector(0)) * '
        f"(count({engines}) or vector(0))"
    )


def test_keda_counts_queued_waiting_and_running_requests_of_its_release() -> None:
    values = {**KEDA, "enginePool.keda.trigger": "prometheus", "enginePool.servedModelName": "fast"}
    (trigger,) = lookup(render(values), "ScaledObject", "proa-engine-builtin", "spec", "triggers")
    release = 'namespace="here",app_kubernetes_io_instance="proa"'
    assert trigger["metadata"]["query"] == (
        f'sum(proa_gateway_queue_depth{{model="fast",{release}}} or vector(0))'
        f' + sum(vllm:num_requests_waiting{{model_name="fast",engine="0",proa_role!="prefill",{release}}} or vector(0))'
        f' + sum(vllm:num_requests_running{{model_name="fast",engine="0",proa_role!="prefill",{release}}} or vector(0))'
    )
