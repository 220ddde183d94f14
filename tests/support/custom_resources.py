"""JSON schemas of other projects' custom resources that the chart renders, limited to the fields that it uses.

Written from those projects' API references: unlike Kubernetes' own kinds, they have no published JSON schemas.
"""

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
INTERVAL: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
NUMBER_AS_TEXT: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def some(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def mapping(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values, "minProperties": 1}


def custom_object(api_version: str, spec: Schema) -> Schema:
    labels = mapping({"type": "string", "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"})
    name = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
    metadata = record({"name": name, "labels": labels}, {"annotations": mapping({"type": "string"})})
    return record({"apiVersion": {"const": api_version}, "kind": TEXT, "metadata": metadata, "spec": spec})


def monitor(endpoints: str, endpoint: Schema) -> Schema:
    selector = record({"matchLabels": mapping(TEXT)})
    spec = record({"selector": selector, endpoints: some(endpoint)}, {"podTargetLabels": some(TEXT)})
    return custom_object("monitoring.coreos.com/v1", spec)


SCRAPED = {"port": TEXT, "interval": INTERVAL}
DROP = record({"action": {"const": "drop"}, "sourceLabels": some(TEXT), "regex": TEXT})
KEEP = record({"action": {"const": "keep"}, "sourceLabels": some(TEXT), "regex": TEXT})
PROMETHEUS_TRIGGER = record(
    {
        "type": {"const": "prometheus"},
        "metadata": record({"serverAddress": TEXT, "query": TEXT, "threshold": NUMBER_AS_TEXT}),
    }
)
GATEWAY_TRIGGER = record(
    {
        "type": {"const": "external-push"},
        "metadata": record({"scalerAddress": TEXT, "model": TEXT, "role": TEXT, "target": NUMBER_AS_TEXT}),
    }
)
SCALE_TARGET = record({"apiVersion": TEXT, "kind": {"enum": ["Deployment", "LeaderWorkerSet"]}, "name": TEXT})
PARENT = record({"name": TEXT}, {"namespace": TEXT, "sectionName": TEXT, "group": TEXT, "kind": TEXT, "port": PORT})

POD_TEMPLATE = record({"metadata": {"type": "object"}, "spec": {"type": "object"}})
PODS_OR_PERCENT: Schema = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
GROUP = record(
    {
        "size": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        "leaderTemplate": POD_TEMPLATE,
        "workerTemplate": POD_TEMPLATE,
    }
)
ROLLOUT = record(
    {
        "type": {"const": "RollingUpdate"},
        "rollingUpdateConfiguration": record({"maxUnavailable": PODS_OR_PERCENT, "maxSurge": PODS_OR_PERCENT}),
    }
)

ALERT = record(
    {
        "alert": {"type": "string", "pattern": "^[A-Za-z]+$"},
        "expr": TEXT,
        "for": INTERVAL,
        "labels": mapping(TEXT),
        "annotations": mapping(TEXT),
    }
)

SCHEMAS: dict[str, Schema] = {
    "HTTPRoute": custom_object(
        "gateway.networking.k8s.io/v1",
        record(
            {
                "parentRefs": some(PARENT),
                "rules": some(record({"backendRefs": some(record({"name": TEXT, "port": PORT}))})),
            },
            {"hostnames": some(TEXT)},
        ),
    ),
    "PrometheusRule": custom_object(
        "monitoring.coreos.com/v1", record({"groups": some(record({"name": TEXT, "rules": some(ALERT)}))})
    ),
    "ServiceMonitor": monitor("endpoints", record(SCRAPED, {"path": TEXT, "metricRelabelings": some(DROP)})),
    "PodMonitor": monitor("podMetricsEndpoints", record(SCRAPED, {"path": TEXT, "relabelings": some(KEEP)})),
    "ScaledObject": custom_object(
        "keda.sh/v1alpha1",
        record(
            {"scaleTargetRef": SCALE_TARGET, "triggers": some({"anyOf": [PROMETHEUS_TRIGGER, GATEWAY_TRIGGER]})},
            {"minReplicaCount": COUNT, "maxReplicaCount": COUNT, "cooldownPeriod": COUNT},
        ),
    ),
    "LeaderWorkerSet": custom_object(
        "leaderworkerset.x-k8s.io/v1",
        record(
            {
                "rolloutStrategy": ROLLOUT,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": record({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}),
                "leaderWorkerTemplate": GROUP,
            },
            {"replicas": COUNT},
        ),
    ),
}
