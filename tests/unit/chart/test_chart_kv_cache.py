"""Pools with host memory and disk for the KV cache, and pools that exchange its blocks."""

from typing import Any

import pytest

from support.chart import EXCHANGE, PREFILL_AND_DECODE, SIDECAR, lookup, needs_helm, render

pytestmark = needs_helm
KINDS = [  # arguments of a prefill pool and of a decode pool whose blocks are the same
    (["--dtype=float16"], ["--dtype", "float16"]),
    (["--seed=1", "--dtype=float16"], ["--dtype=float16", "--seed=1"]),
    (["--max-num-seqs=4"], []),
]


def pod(values: dict[str, Any], pool: str = "builtin") -> Any:
    return lookup(render(values), "Deployment", f"proa-engine-{pool}", "spec", "template", "spec")


def volume(of: Any, name: str) -> Any:
    (found,) = [each for each in of["volumes"] if each["name"] == name]
    return found


def pool(**values: Any) -> dict[str, Any]:
    return {f"enginePool.{name.replace('__', '.')}": value for name, value in values.items()}


def test_pods_have_their_role_as_a_label_and_an_argument() -> None:
    objects = render(PREFILL_AND_DECODE)
    for name, role in (("prompts", "prefill"), ("answers", "decode")):
        template = lookup(objects, "Deployment", f"proa-engine-{name}", "spec", "template")
        assert template["metadata"]["labels"]["proa/role"] == role
        assert f"--role={role}" in template["spec"]["containers"][0]["args"]
        selector = lookup(objects, "Deployment", f"proa-engine-{name}", "spec", "selector", "matchLabels")
        assert "proa/role" not in selector, "selectors are immutable"


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("org/Big_7B", "org-Big-7B-"),
        ("/" * 70 + "m", "m-"),
        ("/", ""),
        ("m" * 80, "m" * 50 + "-"),
    ],
)
def test_the_label_of_a_model_is_valid(model: str, label: str) -> None:
    labels = lookup(
        render(pool(model=model)), "Deployment", "proa-engine-builtin", "spec", "template", "metadata", "labels"
    )
    assert labels["proa/model"][:-8] == label
    assert labels["proa/model"][-8:].isalnum()
    assert len(labels["proa/model"]) <= 63


def test_the_port_of_each_rank_is_on_the_container_that_runs_it() -> None:
    values = pool(tensorParallelSize=2, hostCache__sizeGb=1, kvTransfer__enabled=True)
    (engine,) = pod(values)["containers"]
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    assert (ports["kv-0"], ports["kv-1"]) == (50061, 50062)

    parallel = pod({**values, **SIDECAR})
    (engine,), (worker,) = parallel["containers"], parallel["initContainers"]
    assert [port["name"] for port in engine["ports"]] == ["grpc", "metrics", "health", "kv-0"]
    assert worker["ports"] == [{"name": "kv-1", "containerPort": 50062}]


def test_engines_fetch_from_the_pods_of_their_release_alone() -> None:
    objects = render({**PREFILL_AND_DECODE, "networkPolicy.enabled": False})
    for name in ("prompts", "answers"):
        spec = lookup(objects, "Deployment", f"proa-engine-{name}", "spec", "template", "spec")
        (argument,) = [each for each in spec["containers"][0]["args"] if each.startswith("--kv-transfer-sources=")]
        service, namespace = argument.removeprefix("--kv-transfer-sources=").split(".")
        assert lookup(objects, "Service", service, "spec", "clusterIP") == "None", "its name has the pods' addresses"
        assert lookup(objects, "Service", service, "spec", "publishNotReadyAddresses"), "also of one that drains"
        assert namespace == "here"


def test_shared_memory_has_room_for_a_host_cache_that_survives_restarts() -> None:
    values = pool(hostCache__sizeGb=1.5)
    assert volume(pod(values), "shm")["emptyDir"]["sizeLimit"] == "1Gi"
    kept = pod({**values, **pool(hostCache__survivesRestart=True)})
    assert volume(kept, "shm")["emptyDir"]["sizeLimit"] == "2560Mi"
    (argument,) = [each for each in kept["containers"][0]["args"] if "offloading-path" in each]
    (mount,) = [each for each in kept["containers"][0]["volumeMounts"] if each["name"] == "shm"]
    assert argument.partition("=")[2].startswith(f"{mount['mountPath']}/")


def test_a_disk_cache_without_a_claim_is_requested_as_ephemeral_storage() -> None:
    values = pool(tensorParallelSize=2, hostCache__sizeGb=1, diskCache__sizeGb=10)
    for mode, requested in (("process", ["11Gi"]), ("sidecar", ["6Gi", "6Gi"])):
        found = pod({**values, "enginePool.tensorParallel.mode": mode})
        containers = found["containers"] + found.get("initContainers", [])
        assert [each["resources"]["requests"]["ephemeral-storage"] for each in containers] == requested
        assert all({"name": "kv-disk", "mountPath": "/kv-disk"} in each["volumeMounts"] for each in containers)
        assert volume(found, "kv-disk") == {"name": "kv-disk", "emptyDir": {"sizeLimit": "12Gi"}}


def test_a_disk_cache_on_a_claim_takes_none_of_the_nodes_disk() -> None:
    values = pool(hostCache__sizeGb=1, diskCache__sizeGb=10, diskCache__claimName="c")
    assert "ephemeral-storage" not in pod(values)["containers"][0]["resources"]["requests"]


@pytest.mark.parametrize(("prefill", "decode"), KINDS)
def test_pools_work_together_whose_flags_give_the_same_blocks(prefill: list[str], decode: list[str]) -> None:
    prompts = {**EXCHANGE, "role": "prefill", "extraArgs": prefill}
    assert render({"engines": {"prompts": prompts, "answers": {**EXCHANGE, "role": "decode", "extraArgs": decode}}})
    assert render({"engines": {"prompts": prompts, "all": {**EXCHANGE, "extraArgs": decode}}})


def test_each_role_scales_by_its_own_load() -> None:
    objects = render(PREFILL_AND_DECODE)
    (prompts,) = lookup(objects, "HorizontalPodAutoscaler", "proa-engine-prompts", "spec", "metrics")
    assert prompts["pods"]["metric"]["name"] == "vllm_num_requests_waiting"
    assert prompts["pods"]["target"]["averageValue"] == "4"
    usage, queue = lookup(objects, "HorizontalPodAutoscaler", "proa-engine-answers", "spec", "metrics")
    assert usage["pods"]["metric"]["name"] == "vllm_kv_cache_usage_perc"
    assert usage["pods"]["target"]["averageValue"] == "800m"
    assert queue["object"]["metric"]["name"] == "proa_gateway_queue_depth"
    assert queue["object"]["target"]["averageValue"] == "4"


@pytest.mark.parametrize("target", [8, 0.8, "800m"])
def test_the_target_of_autoscaling_is_a_number_or_a_quantity(target: float | str) -> None:
    objects = render(pool(autoscaling__enabled=True, autoscaling__target=target))
    metrics = lookup(objects, "HorizontalPodAutoscaler", "proa-engine-builtin", "spec", "metrics")
    assert metrics[0]["pods"]["target"]["averageValue"] == str(target)


def test_keda_scales_a_prefill_pool_by_its_own_requests() -> None:
    keda = {"enabled": True, "trigger": "prometheus", "minReplicas": 1}
    prompts = {**EXCHANGE, "role": "prefill", "keda": keda}
    objects = render({"engines": {"prompts": prompts, "answers": {**EXCHANGE, "role": "decode", "keda": keda}}})
    queries = {
        name: lookup(objects, "ScaledObject", f"proa-engine-{name}", "spec", "triggers", 0, "metadata", "query")
        for name in ("prompts", "answers")
    }
    assert queries["prompts"].count('proa_pool="prompts"') == 2
    assert "queue_depth" not in queries["prompts"]
    assert queries["answers"].count('proa_role!="prefill"') == 2
    assert "queue_depth" in queries["answers"]
