"""Each value outside of pools and what it changes."""

from typing import Any

import pytest

from proa_gateway.http.middleware import AllowedHosts, parse_host_pattern
from support.chart import (
    ENGINE,
    ENGINE_POD,
    GATEWAY,
    GATEWAY_POD,
    LEADER,
    TWO_NODES,
    Case,
    lookup,
    needs_helm,
    render,
)

pytestmark = needs_helm
ARGUMENTS = (*GATEWAY, "args")
SERVICE = ("Service", "proa-gateway")
INGRESS = ("Ingress", "proa-gateway")
ROUTE = ("HTTPRoute", "proa-gateway")
GATEWAY_POLICY = ("NetworkPolicy", "proa-gateway", "spec")
ENGINE_POLICY = ("NetworkPolicy", "proa-engine", "spec")
PEER = {"podSelector": {"matchLabels": {"app": "friend"}}}
RULE = {"ports": [{"protocol": "TCP", "port": 5432}]}
INIT = {"name": "first", "image": "busybox"}
RULES = ("PrometheusRule", "proa", "spec", "groups", 0, "rules")
WITH_RULES = {"prometheusRule.enabled": True}
HPA = ("HorizontalPodAutoscaler", "proa-gateway", "spec")
WITH_HPA = {"gateway.autoscaling.enabled": True}
WITH_KEDA = {"enginePool.keda.enabled": True, "enginePool.keda.minReplicas": 1}
WITH_INGRESS = {"gateway.ingress.enabled": True}
WITH_ROUTE = {"gateway.httpRoute.enabled": True, "gateway.httpRoute.parentRefs": [{"name": "edge"}]}
WITH_TRACES = {"otel.OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}

CASES = {
    "nameOverride": Case(
        value="outrigger", at=("Service", "proa-outrigger-gateway", "spec", "selector", "app.kubernetes.io/name")
    ),
    "fullnameOverride": Case(
        value="canoe", at=("Service", "canoe-gateway", "metadata", "name"), expected="canoe-gateway"
    ),
    "commonLabels": Case(
        value={"team": "sea"}, at=(*GATEWAY_POD[:4], "metadata", "labels", "team"), expected="sea"
    ),
    "image.registry": Case(value="r:5000/x", at=(*GATEWAY, "image"), expected="r:5000/x/proa-gateway:0.1.0"),
    "image.pullPolicy": Case(value="Always", at=(*ENGINE, "imagePullPolicy")),
    "image.pullSecrets": Case(value=["login"], at=(*ENGINE_POD, "imagePullSecrets"), expected=[{"name": "login"}]),
    "serviceAccount.create": Case(
        value=False, at=(*GATEWAY_POD, "serviceAccountName"), expected="ours", also={"serviceAccount.name": "ours"}
    ),
    "serviceAccount.name": Case(value="ours", at=("ServiceAccount", "ours", "metadata", "name")),
    "serviceAccount.annotations": Case(
        value={"role": "reader"}, at=("ServiceAccount", "proa-gateway", "metadata", "annotations")
    ),
    "gateway.image.repository": Case(value="gate", at=(*GATEWAY, "image"), expected="gate:0.1.0"),
    "gateway.image.tag": Case(value="dev", at=(*GATEWAY, "image"), expected="proa-gateway:dev"),
    "gateway.replicas": Case(value=3, at=("Deployment", "proa-gateway", "spec", "replicas")),
    "gateway.autoscaling.enabled": Case(
        value=True, at=(*HPA, "scaleTargetRef", "name"), expected="proa-gateway"
    ),
    "gateway.autoscaling.minReplicas": Case(value=3, at=(*HPA, "minReplicas"), also=WITH_HPA),
    "gateway.autoscaling.maxReplicas": Case(value=9, at=(*HPA, "maxReplicas"), also=WITH_HPA),
    "gateway.autoscaling.targetCpu": Case(
        value="1", at=(*HPA, "metrics", 0, "containerResource", "target", "averageValue"), also=WITH_HPA
    ),
    "gateway.port": Case(value=9000, at=(*GATEWAY, "ports", 0, "containerPort")),
    "gateway.scalerPort": Case(value=6003, at=(*GATEWAY, "args"), contains="--scaler-port=6003", also=WITH_KEDA),
    "gateway.healthPort": Case(value=8181, at=(*GATEWAY, "ports", 1, "containerPort")),
    "gateway.routing": Case(value="session", at=ARGUMENTS, contains="--routing=session"),
    "gateway.sessionAdmission.mode": Case(value="wait", at=ARGUMENTS, contains="--session-admission=wait"),
    "gateway.sessionAdmission.maxWaitSeconds": Case(value=7.5, at=ARGUMENTS, contains="--session-max-wait=7.5"),
    "gateway.maxConcurrentRequests": Case(value=7, at=ARGUMENTS, contains="--max-concurrent-requests=7"),
    "gateway.maxQueuedTokens": Case(value=9, at=ARGUMENTS, contains="--max-queued-tokens=9"),
    "gateway.requestTimeoutSeconds": Case(value=90, at=ARGUMENTS, contains="--request-timeout=90"),
    "gateway.queue.maxWaitingRequests": Case(value=5, at=ARGUMENTS, contains="--max-waiting-requests=5"),
    "gateway.queue.timeoutSeconds": Case(value=2.5, at=ARGUMENTS, contains="--queue-timeout=2.5"),
    "gateway.scaleFromZero.timeoutSeconds": Case(value=90, at=ARGUMENTS, contains="--scale-from-zero-timeout=90"),
    "gateway.kvTransfer.bandwidth": Case(
        value=12.5, at=(*GATEWAY, "args"), contains="--kv-transfer-bandwidth=12.5"
    ),
    "gateway.kvTransfer.minRemotePrefillTokens": Case(
        value=256, at=(*GATEWAY, "args"), contains="--min-remote-prefill-tokens=256"
    ),
    "gateway.podDeletionCost": Case(value=True, at=(*GATEWAY, "args"), contains="--pod-deletion-cost"),
    "gateway.apiKeys.existingSecret": Case(
        value="keys", at=(*GATEWAY_POD, "volumes"), contains={"name": "keys", "secret": {"secretName": "keys"}}
    ),
    "gateway.apiKeys.separatePrefixCaches": Case(value=True, at=ARGUMENTS, contains="--separate-prefix-caches"),
    "gateway.allowedHosts": Case(value=["*.example.com"], at=ARGUMENTS, contains="--allowed-hosts=*.example.com"),
    "gateway.images.allowedMediaDomains": Case(
        value=["cats.example"], at=ARGUMENTS, contains="--allowed-media-domains=cats.example"
    ),
    "gateway.images.fetchTimeoutSeconds": Case(value=2.5, at=ARGUMENTS, contains="--image-fetch-timeout=2.5"),
    "gateway.images.maxBytes": Case(value=5_000_000, at=ARGUMENTS, contains="--max-image-bytes=5000000"),
    "gateway.images.maxPixels": Case(value=9_000_000, at=ARGUMENTS, contains="--max-image-pixels=9000000"),
    "gateway.images.maxPerPrompt": Case(value=0, at=ARGUMENTS, contains='--limit-mm-per-prompt={"audio":4,"image":0}'),
    "gateway.audio.maxBytes": Case(value=5_000_000, at=ARGUMENTS, contains="--max-audio-bytes=5000000"),
    "gateway.audio.maxSeconds": Case(value=60, at=ARGUMENTS, contains="--max-audio-seconds=60"),
    "gateway.audio.maxMemoryBytes": Case(value=90_000_000, at=ARGUMENTS, contains="--max-audio-memory=90000000"),
    "gateway.audio.processes": Case(value=4, at=ARGUMENTS, contains="--audio-processes=4"),
    "gateway.audio.maxPerPrompt": Case(value=0, at=ARGUMENTS, contains='--limit-mm-per-prompt={"audio":0,"image":16}'),
    "gateway.audio.decodeTimeoutSeconds": Case(value=2.5, at=ARGUMENTS, contains="--audio-decode-timeout=2.5"),
    "gateway.chatTemplate": Case(
        value='{{ "$(HOME)" }}\n<a>', at=ARGUMENTS, contains='--chat-template={{ "$$(HOME)" }}\n<a>'
    ),
    "gateway.toolCallParser": Case(value="hermes", at=ARGUMENTS, contains="--tool-call-parser=hermes"),
    "gateway.reasoningParser": Case(value="none", at=ARGUMENTS, contains="--reasoning-parser=none"),
    "gateway.plainSpecialTokens": Case(value=True, at=ARGUMENTS, contains="--plain-special-tokens"),
    "gateway.logLevel": Case(value="debug", at=ARGUMENTS, contains="--log-level=debug"),
    "gateway.logFormat": Case(value="json", at=ARGUMENTS, contains="--log-format=json"),
    "gateway.accessLog": Case(value=True, at=ARGUMENTS, contains="--access-log"),
    "gateway.extraArgs": Case(value=["--stream-interval=2"], at=ARGUMENTS, contains="--stream-interval=2"),
    "gateway.env": Case(
        value=[{"name": "A", "value": "b"}], at=(*GATEWAY, "env"), contains={"name": "A", "value": "b"}
    ),
    "gateway.resources": Case(
        value={"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}, at=(*GATEWAY, "resources")
    ),
    "gateway.terminationGracePeriodSeconds": Case(
        value=100, at=(*GATEWAY_POD, "terminationGracePeriodSeconds"), expected=110
    ),
    "gateway.preStopSeconds": Case(value=9, at=(*GATEWAY, "lifecycle", "preStop", "sleep", "seconds")),
    "gateway.rollingUpdate": Case(
        value={"maxUnavailable": 1, "maxSurge": "50%"},
        at=("Deployment", "proa-gateway", "spec", "strategy", "rollingUpdate"),
    ),
    "gateway.podDisruptionBudget.enabled": Case(
        value=True, at=("PodDisruptionBudget", "proa-gateway", "spec", "unhealthyPodEvictionPolicy"),
        expected="AlwaysAllow",
    ),
    "gateway.podDisruptionBudget.maxUnavailable": Case(
        value="25%", at=("PodDisruptionBudget", "proa-gateway", "spec", "maxUnavailable")
    ),
    "gateway.service.type": Case(value="NodePort", at=(*SERVICE, "spec", "type")),
    "gateway.service.port": Case(value=81, at=(*SERVICE, "spec", "ports", 0, "port")),
    "gateway.service.annotations": Case(value={"a": "b"}, at=(*SERVICE, "metadata", "annotations")),
    "gateway.ingress.enabled": Case(
        value=True, at=(*INGRESS, "spec", "rules", 0, "http", "paths", 0, "path"), expected="/"
    ),
    "gateway.ingress.className": Case(value="nginx", at=(*INGRESS, "spec", "ingressClassName"), also=WITH_INGRESS),
    "gateway.ingress.annotations": Case(value={"a": "b"}, at=(*INGRESS, "metadata", "annotations"), also=WITH_INGRESS),
    "gateway.ingress.hosts": Case(
        value=["llm.example"], at=(*INGRESS, "spec", "rules", 0, "host"), expected="llm.example", also=WITH_INGRESS
    ),
    "gateway.ingress.tls": Case(value=[{"secretName": "cert"}], at=(*INGRESS, "spec", "tls"), also=WITH_INGRESS),
    "gateway.httpRoute.enabled": Case(
        value=True, at=(*ROUTE, "spec", "rules", 0, "backendRefs"),
        expected=[{"name": "proa-gateway", "port": 80}], also=WITH_ROUTE,
    ),
    "gateway.httpRoute.annotations": Case(value={"a": "b"}, at=(*ROUTE, "metadata", "annotations"), also=WITH_ROUTE),
    "gateway.httpRoute.parentRefs": Case(value=[{"name": "door"}], at=(*ROUTE, "spec", "parentRefs"), also=WITH_ROUTE),
    "gateway.httpRoute.hostnames": Case(value=["llm.example"], at=(*ROUTE, "spec", "hostnames"), also=WITH_ROUTE),
    "gateway.envFrom": Case(value=[{"configMapRef": {"name": "settings"}}], at=(*GATEWAY, "envFrom")),
    "gateway.podLabels": Case(value={"a": "b"}, at=(*GATEWAY_POD[:4], "metadata", "labels", "a"), expected="b"),
    "gateway.initContainers": Case(value=[INIT], at=(*GATEWAY_POD, "initContainers"), contains=INIT),
    "gateway.priorityClassName": Case(value="high", at=(*GATEWAY_POD, "priorityClassName")),
    "gateway.schedulerName": Case(value="volcano", at=(*GATEWAY_POD, "schedulerName")),
    "gateway.podSecurityContext": Case(
        value={"runAsUser": 7, "runAsGroup": None, "fsGroup": None}, at=(*GATEWAY_POD, "securityContext"),
        expected={"runAsNonRoot": True, "runAsUser": 7, "seccompProfile": {"type": "RuntimeDefault"}},
    ),
    "gateway.securityContext": Case(
        value={"readOnlyRootFilesystem": False, "capabilities": None}, at=(*GATEWAY, "securityContext"),
        expected={"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": False},
    ),
    "gateway.runtimeClassName": Case(value="gvisor", at=(*GATEWAY_POD, "runtimeClassName")),
    "gateway.volumes": Case(
        value=[{"name": "x", "emptyDir": {}}], at=(*GATEWAY_POD, "volumes"), contains={"name": "x", "emptyDir": {}}
    ),
    "gateway.volumeMounts": Case(
        value=[{"name": "tmp", "mountPath": "/x"}], at=(*GATEWAY, "volumeMounts"),
        contains={"name": "tmp", "mountPath": "/x"},
    ),
    "gateway.podAnnotations": Case(value={"a": "b"}, at=(*GATEWAY_POD[:4], "metadata", "annotations")),
    "gateway.nodeSelector": Case(value={"disk": "fast"}, at=(*GATEWAY_POD, "nodeSelector")),
    "gateway.tolerations": Case(value=[{"operator": "Exists"}], at=(*GATEWAY_POD, "tolerations")),
    "gateway.affinity": Case(value={"nodeAffinity": {}}, at=(*GATEWAY_POD, "affinity")),
    "gateway.topologySpreadConstraints": Case(
        value=[{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        at=(*GATEWAY_POD, "topologySpreadConstraints", 0, "labelSelector", "matchLabels"),
        contains="app.kubernetes.io/component",
    ),
    "engine.image.repository": Case(value="eng", at=(*ENGINE, "image"), expected="eng:0.1.0"),
    "engine.image.tag": Case(value="dev", at=(*ENGINE, "image"), expected="proa-engine:dev"),
    "engine.port": Case(value=6000, at=(*GATEWAY, "args"), contains="--engine-service=proa-engine.here:6000"),
    "engine.metricsPort": Case(value=6001, at=(*ENGINE, "args"), contains="--metrics-port=6001"),
    "engine.healthPort": Case(value=6002, at=(*ENGINE, "args"), contains="--health-port=6002"),
    "engine.masterPort": Case(
        value=6003, at=(*LEADER, "containers", 0, "args"), contains="--master-port=6003", also=TWO_NODES
    ),
    "engine.kvPort": Case(
        value=6003, at=(*ENGINE, "args"), contains="--kv-transfer-address=:6003",
        also={"enginePool.hostCache.sizeGb": 1, "enginePool.kvTransfer.enabled": True},
    ),
    "engines": Case(
        value={"tiny": {"replicas": 2}}, at=("Deployment", "proa-engine-tiny", "spec", "replicas"), expected=2
    ),
    "tls.existingSecret": Case(
        value="certs", at=(*ENGINE_POD, "volumes"), contains={"name": "tls", "secret": {"secretName": "certs"}}
    ),
    "networkPolicy.enabled": Case(
        value=True, at=(*ENGINE_POLICY, "policyTypes"), expected=["Ingress", "Egress"]
    ),
    "networkPolicy.gateway.from": Case(value=[PEER], at=(*GATEWAY_POLICY, "ingress", 0, "from"), contains=PEER),
    "networkPolicy.gateway.egress": Case(value=[RULE], at=(*GATEWAY_POLICY, "egress"), contains=RULE),
    "networkPolicy.engine.from": Case(value=[PEER], at=(*ENGINE_POLICY, "ingress", 0, "from"), contains=PEER),
    "networkPolicy.engine.egress": Case(value=[RULE], at=(*ENGINE_POLICY, "egress"), contains=RULE),
    "networkPolicy.scaler.from": Case(
        value=[PEER], at=(*GATEWAY_POLICY, "ingress", 1, "from"), contains=PEER, also=WITH_KEDA
    ),
    "networkPolicy.metrics.from": Case(value=[PEER], at=(*ENGINE_POLICY, "ingress", 1, "from")),
    "networkPolicy.otlp.to": Case(value=[PEER], at=(*ENGINE_POLICY, "egress", 1, "to"), also=WITH_TRACES),
    "networkPolicy.otlp.ports": Case(
        value=[55], at=(*ENGINE_POLICY, "egress", 1, "ports"), expected=[{"protocol": "TCP", "port": 55}],
        also=WITH_TRACES,
    ),
    "monitoring.enabled": Case(
        value=True, at=("PodMonitor", "proa-engine", "spec", "podMetricsEndpoints", 0, "port"), expected="metrics"
    ),
    "monitoring.labels": Case(
        value={"release": "prom"}, at=("ServiceMonitor", "proa-gateway", "metadata", "labels", "release"),
        expected="prom", also={"monitoring.enabled": True},
    ),
    "monitoring.interval": Case(
        value="5s", at=("ServiceMonitor", "proa-gateway", "spec", "endpoints", 0, "interval"),
        also={"monitoring.enabled": True},
    ),
    "prometheusRule.enabled": Case(value=True, at=(*RULES, 0, "alert"), expected="ProaGatewayDown"),
    "prometheusRule.labels": Case(
        value={"release": "prom"}, at=("PrometheusRule", "proa", "metadata", "labels", "release"), expected="prom",
        also=WITH_RULES,
    ),
    "prometheusRule.alertLabels": Case(
        value={"team": "sea", "severity": "page"}, at=(*RULES, 0, "labels"), also=WITH_RULES,
        expected={"namespace": "here", "release": "proa", "severity": "page", "team": "sea"},
    ),
    "prometheusRule.runbookUrl": Case(
        value="https://wiki/alerts", at=(*RULES, 0, "annotations", "runbook_url"), also=WITH_RULES,
        expected="https://wiki/alerts#proagatewaydown",
    ),
    "prometheusRule.thresholds.failedRequests": Case(
        value=0.5, at=(*RULES, 2, "expr"), contains=") > 0.5", also=WITH_RULES
    ),
    "prometheusRule.thresholds.rejectedRequests": Case(
        value=0.5, at=(*RULES, 3, "expr"), contains=") > 0.5", also=WITH_RULES
    ),
    "prometheusRule.thresholds.queueWaitSeconds": Case(
        value=33, at=(*RULES, 4, "expr"), contains=") > 33", also=WITH_RULES
    ),
    "prometheusRule.thresholds.timeToFirstTokenSeconds": Case(
        value=33, at=(*RULES, 5, "expr"), contains=") > 33", also=WITH_RULES
    ),
    "prometheusRule.thresholds.sessionWaitSeconds": Case(
        value=33, at=(*RULES, 12, "expr"), contains=") > 33", also=WITH_RULES
    ),
    "prometheusRule.thresholds.kvCacheUsage": Case(
        value=0.5, at=(*RULES, 9, "expr"), contains=") > 0.5", also=WITH_RULES
    ),
    "dashboards.enabled": Case(
        value=True, at=("ConfigMap", "proa-dashboards", "metadata", "labels", "grafana_dashboard"), expected="1"
    ),
    "dashboards.labels": Case(
        value={"board": "yes"}, at=("ConfigMap", "proa-dashboards", "metadata", "labels", "board"), expected="yes",
        also={"dashboards.enabled": True},
    ),
    "extraObjects": Case(
        value=[{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}],
        at=("ConfigMap", "proa-more", "metadata", "name"), expected="proa-more",
    ),
    "otel": Case(
        value={"OTEL_SDK_DISABLED": True}, at=(*ENGINE, "env"), contains={"name": "OTEL_SDK_DISABLED", "value": "true"}
    ),
}  # fmt: skip


HOSTS = ("gateway.ingress.hosts", "gateway.httpRoute.hostnames")


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, []),
        ({host: ["llm.example"] for host in HOSTS}, []),  # neither is enabled
        ({**WITH_INGRESS, "gateway.ingress.hosts": ["llm.example", "*.a.example"]}, ["llm.example", "*.a.example"]),
        ({**WITH_ROUTE, "gateway.httpRoute.hostnames": ["llm.example"]}, ["llm.example"]),
        (WITH_INGRESS, ["*"]),  # for all hosts
        (WITH_ROUTE, ["*"]),
        ({**WITH_INGRESS, **WITH_ROUTE, **{host: ["a.example"] for host in HOSTS}}, ["a.example"]),
    ],
)
def test_gateways_answer_under_the_names_that_the_chart_gives_them(values: dict[str, Any], names: list[str]) -> None:
    flag = "--allowed-hosts="
    arguments = lookup(render(values), *ARGUMENTS)
    hosts = AllowedHosts(given := [each.removeprefix(flag) for each in arguments if each.startswith(flag)])
    assert given[3:] == names
    for name in ("proa-gateway", "proa-gateway.here", "proa-gateway.here.svc", "proa-gateway.here.svc.cluster.local"):
        hosts.check(f"{name}:80")
    for name in names:
        hosts.check(name.replace("*", "any"))
        assert parse_host_pattern(name) == name


@pytest.mark.parametrize("path", CASES)
def test_a_value_changes_its_object(path: str) -> None:
    CASES[path].check(path)
