"""Custom resources of other projects: valid, and consistent with the objects that they refer to."""

import re
from typing import Any

import jsonschema  # a dependency of kubernetes-validate
import pytest

from support.chart import Objects, lookup, needs_helm, render
from support.custom_resources import SCHEMAS
from support.metric_names import engine_metrics, gateway_metrics

pytestmark = needs_helm
CUSTOM = {
    "commonLabels": {"team": "sea"},
    "gateway.httpRoute.enabled": True,
    "gateway.httpRoute.annotations": {"note": "edge"},
    "gateway.httpRoute.parentRefs": [{"name": "edge", "namespace": "infra", "sectionName": "https"}],
    "gateway.httpRoute.hostnames": ["llm.example"],
    "monitoring.enabled": True,
    "prometheusRule.enabled": True,
    "monitoring.labels": {"release": "prometheus", "team": "other"},
    "enginePool.keda.enabled": True,
    "enginePool.keda.minReplicas": 1,
    "engines.big": {
        "model": "org/big",
        "keda": {"enabled": True, "trigger": "prometheus", "minReplicas": 1, "target": 3},
    },
    "engines.wide": {"model": "org/wide", "tensorParallelSize": 8, "nodes": 2},
}


@pytest.fixture(scope="module")
def objects() -> Objects:
    return render(CUSTOM)


def selected(objects: Objects, kind: str, labels: dict[str, str]) -> list[Any]:
    """The objects of a kind that have the labels; for Deployments, their pod templates."""
    found = [each for (a_kind, _), each in objects.items() if a_kind == kind]
    holders = [each["spec"]["template"] if kind == "Deployment" else each for each in found]
    return [each for each in holders if labels.items() <= each["metadata"]["labels"].items()]


def test_every_custom_resource_matches_its_schema(objects: Objects) -> None:
    custom = [(kind, each) for (kind, _), each in objects.items() if kind in SCHEMAS]
    assert {kind for kind, _ in custom} == SCHEMAS.keys()
    for kind, each in custom:
        jsonschema.validate(each, SCHEMAS[kind], jsonschema.Draft202012Validator)


def test_monitors_scrape_existing_ports(objects: Objects) -> None:
    gateway = lookup(objects, "ServiceMonitor", "proa-gateway", "spec")
    (service,) = selected(objects, "Service", gateway["selector"]["matchLabels"])
    assert [each["port"] for each in gateway["endpoints"]] == [each["name"] for each in service["spec"]["ports"]]

    engine = lookup(objects, "PodMonitor", "proa-engine", "spec")
    pods = selected(objects, "Deployment", engine["selector"]["matchLabels"])
    assert len(pods) == 2
    for pod in pods:
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {each["port"] for each in engine["podMetricsEndpoints"]} <= ports


def test_pods_that_download_a_model_are_not_scraped(objects: Objects) -> None:
    (endpoint,) = lookup(objects, "PodMonitor", "proa-engine", "spec", "podMetricsEndpoints")
    (rule,) = endpoint["relabelings"]
    assert rule == {"action": "keep", "sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Running"}


def test_vllms_metrics_are_scraped_once(objects: Objects) -> None:
    endpoint = lookup(objects, "ServiceMonitor", "proa-gateway", "spec", "endpoints", 0)
    (rule,) = endpoint["metricRelabelings"]
    assert (rule["action"], rule["sourceLabels"]) == ("drop", ["__name__"])
    gateway = {name for name in gateway_metrics() if name.startswith("vllm:")}
    dropped = {name for name in gateway if re.fullmatch(rule["regex"], name)}
    assert dropped == gateway & engine_metrics()
    assert dropped
    assert gateway - dropped


def test_scaled_objects_select_by_labels_that_the_monitors_add(objects: Objects) -> None:
    for pool in ("builtin", "big"):
        scaled = lookup(objects, "ScaledObject", f"proa-engine-{pool}", "spec")
        assert ("Deployment", scaled["scaleTargetRef"]["name"]) in objects
    of_pods = set(re.findall(r"(app_kubernetes_io_\w+)=", scaled["triggers"][0]["metadata"]["query"]))
    for monitor in (("ServiceMonitor", "proa-gateway"), ("PodMonitor", "proa-engine")):
        labels = lookup(objects, *monitor, "spec", "podTargetLabels")
        assert of_pods <= {re.sub(r"\W", "_", label) for label in labels}


@pytest.mark.parametrize(
    ("pools", "waits_for_a_request"),
    [
        ({"a": {}}, False),
        ({"a": {"replicas": 0}}, True),
        ({"a": {"replicas": 0, "autoscaling": {"enabled": True}}}, False),
        ({"a": {"keda": {"enabled": True}}}, True),
        ({"a": {"keda": {"enabled": True, "minReplicas": 1}}}, False),
        ({"a": {"keda": {"enabled": True}}, "b": {}}, False),
    ],
)
def test_a_model_without_engines_is_an_alert_unless_its_pools_may_be_empty(
    pools: dict[str, Any], waits_for_a_request: bool
) -> None:
    values = {"engines": pools, "prometheusRule.enabled": True, "gateway.scaleFromZero.timeoutSeconds": 60}
    (group,) = lookup(render(values), "PrometheusRule", "proa", "spec", "groups")
    (rule,) = (each for each in group["rules"] if each["alert"] == "ProaNoEngineReady")
    assert ("and sum(proa_gateway_queue_depth" in rule["expr"]) is waits_for_a_request


def test_the_http_route_targets_the_gateways_service(objects: Objects) -> None:
    ((backend,),) = [rule["backendRefs"] for rule in lookup(objects, "HTTPRoute", "proa-gateway", "spec", "rules")]
    assert backend["port"] in {port["port"] for port in lookup(objects, "Service", backend["name"], "spec", "ports")}


def test_monitoring_labels_take_precedence_over_common_labels(objects: Objects) -> None:
    labels = lookup(objects, "PodMonitor", "proa-engine", "metadata", "labels")
    assert (labels["release"], labels["team"]) == ("prometheus", "other")
