"""Properties of the rendered objects: validity, security, labels, probes, updates."""

import json
from typing import Any

import kubernetes_validate
import pytest

from support.chart import (
    COMBINATIONS,
    ENGINE,
    ENGINE_POD,
    GATEWAY,
    GATEWAY_POD,
    SIDECAR,
    Objects,
    lookup,
    needs_helm,
    render,
)
from support.thorough import THOROUGH

pytestmark = needs_helm
EVERYTHING = COMBINATIONS["optional"]


def containers(objects: Objects) -> list[Any]:
    """Every container of every Deployment."""
    pods = [found["spec"]["template"]["spec"] for (kind, _), found in objects.items() if kind == "Deployment"]
    return [container for pod in pods for container in pod["containers"] + pod.get("initContainers", [])]


@pytest.mark.parametrize("version", ["1.30", "1.32", "1.34", "1.35", "1.37"] if THOROUGH else ["1.30", "1.37"])
def test_every_object_is_valid_kubernetes(version: str) -> None:
    for name, values in COMBINATIONS.items():
        if name == "claimed" and version < "1.34":
            continue  # rejected, see test_chart_refusals.py
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


def test_every_container_has_a_restricted_security_context() -> None:
    objects = render({**EVERYTHING, **SIDECAR})
    for pod in (GATEWAY_POD, ENGINE_POD):
        assert lookup(objects, *pod, "securityContext", "runAsNonRoot")
        assert lookup(objects, *pod, "securityContext", "seccompProfile") == {"type": "RuntimeDefault"}
    for container in containers(objects):
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]


def test_no_pod_has_variables_of_services() -> None:
    objects = render({**EVERYTHING, **SIDECAR})
    for (kind, _), each in objects.items():
        if kind in ("Deployment", "Pod"):
            pod = each if kind == "Pod" else each["spec"]["template"]
            assert pod["spec"]["enableServiceLinks"] is False, each["metadata"]["name"]


def test_no_pod_names_users_or_groups_if_they_are_null() -> None:
    unset = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    objects = render({"gateway.podSecurityContext": unset, "enginePool.podSecurityContext": unset})
    defaults = [f"--set={part}.podSecurityContext.{key}=null" for part in ("gateway", "enginePool") for key in unset]
    assert render({}, *defaults) == objects  # also as the defaults of pools
    for pod in (GATEWAY_POD, ENGINE_POD, ("Pod", "proa-test-builtin", "spec")):
        assert lookup(objects, *pod, "securityContext").keys() == {"runAsNonRoot", "seccompProfile"}


def test_the_role_allows_reading_endpoint_slices_only() -> None:
    assert lookup(render(), "Role", "proa-gateway", "rules") == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    ]


def test_the_role_allows_patching_pods_for_their_deletion_costs() -> None:
    _, rule = lookup(render({"gateway.podDeletionCost": True}), "Role", "proa-gateway", "rules")
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}


def test_the_role_is_bound_to_an_existing_service_account() -> None:
    objects = render({"serviceAccount.create": False, "serviceAccount.name": "ours"})
    assert ("ServiceAccount", "ours") not in objects
    assert ("Role", "proa-gateway") in objects
    assert lookup(objects, "RoleBinding", "proa-gateway", "subjects") == [
        {"kind": "ServiceAccount", "name": "ours", "namespace": "here"}
    ]


def test_a_label_is_a_string_even_if_it_looks_like_a_number() -> None:
    for name in ("1", "on", "1e3"):
        deployment = lookup(render({"engines": {name: {}}}), "Deployment", f"proa-engine-{name}")
        for holder in (deployment["metadata"]["labels"], deployment["spec"]["selector"]["matchLabels"]):
            assert holder["proa/pool"] == name


def test_the_charts_own_labels_take_precedence_over_common_labels() -> None:
    objects = render({"commonLabels": {"app.kubernetes.io/component": "mine", "team": "sea"}})
    labels = lookup(objects, "Deployment", "proa-gateway", "metadata", "labels")
    assert (labels["app.kubernetes.io/component"], labels["team"]) == ("gateway", "sea")


def test_large_numbers_have_no_exponent() -> None:
    values = {"gateway.maxQueuedTokens": 10**9, "gateway.maxConcurrentRequests": 10**6}
    assert {"--max-queued-tokens=1000000000", "--max-concurrent-requests=1000000"} <= set(
        lookup(render(values), *GATEWAY, "args")
    )


def test_each_probe_checks_its_own_health_service() -> None:
    engine = lookup(render(), *ENGINE)
    assert engine["startupProbe"]["grpc"]["service"] == "startup"
    assert engine["livenessProbe"]["grpc"]["service"] == "liveness"
    assert "service" not in engine["readinessProbe"]["grpc"]
    ports = {engine[f"{name}Probe"]["grpc"]["port"] for name in ("startup", "liveness", "readiness")}
    assert {f"--health-port={port}" for port in ports} < set(engine["args"])


def test_the_gateways_probes_are_answered_beside_its_event_loop() -> None:
    gateway = lookup(render({"gateway.healthPort": 8181}), *GATEWAY)
    probes = [gateway[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert [(probe["path"], probe["port"]) for probe in probes] == [
        ("/health", "health"),
        ("/health", "health"),
        ("/ready", "health"),
    ]
    assert {"name": "health", "containerPort": 8181} in gateway["ports"]
    assert "--health-port=8181" in gateway["args"]


def test_rolling_updates_keep_all_pods_by_default() -> None:
    for name in ("proa-gateway", "proa-engine-builtin"):
        update = lookup(render(), "Deployment", name, "spec", "strategy", "rollingUpdate")
        assert update == {"maxUnavailable": 0, "maxSurge": 1}


def test_the_grace_period_covers_pre_stop_and_drain() -> None:
    pod = lookup(render({"gateway.terminationGracePeriodSeconds": 60, "gateway.preStopSeconds": 30}), *GATEWAY_POD)
    assert "--drain-timeout=60" in pod["containers"][0]["args"]
    assert pod["terminationGracePeriodSeconds"] > 60 + 30


def test_otel_variables_reach_every_container() -> None:
    for container in containers(render({**SIDECAR, "otel.OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"})):
        names = {variable["name"] for variable in container["env"]}
        assert {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME"} <= names


def test_no_container_has_a_field_of_its_security_context_that_is_null() -> None:
    nulls = {"readOnlyRootFilesystem": None, "allowPrivilegeEscalation": None}
    objects = render({"gateway.securityContext": nulls, "engines.builtin.securityContext": nulls})
    for container in (GATEWAY, ENGINE, ("Pod", "proa-test-builtin", "spec", "containers", 0)):
        assert lookup(objects, *container, "securityContext") == {"capabilities": {"drop": ["ALL"]}}


def test_a_configured_variable_takes_the_place_of_the_charts() -> None:
    variables = [{"name": name, "value": "mine"} for name in ("HOME", "OTEL_SERVICE_NAME", "HF_HOME", "HF_TOKEN")]
    objects = render(
        {"gateway.env": variables, "enginePool.env": variables, "enginePool.huggingFace.tokenSecret": "hub"},
    )
    for container in (GATEWAY, ENGINE):
        assert lookup(objects, *container, "env") == variables


def test_dashboards_are_json_in_one_config_map() -> None:
    data = lookup(render({"dashboards.enabled": True}), "ConfigMap", "proa-dashboards", "data")
    assert {json.loads(text)["uid"] for text in data.values()} == {"proa-gateway", "proa-engines"}


def test_gateway_and_engine_use_the_same_certificate() -> None:
    objects = render({"tls.existingSecret": "certs"})
    for container in (lookup(objects, *GATEWAY), lookup(objects, *ENGINE)):
        flags = [argument for argument in container["args"] if argument.startswith("--tls-")]
        assert flags == [f"--tls-{key}=/etc/proa/tls/{file}" for key, file in
                         (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))]  # fmt: skip
        assert {"name": "tls", "mountPath": "/etc/proa/tls", "readOnly": True} in container["volumeMounts"]
