"""A custom metrics API in one file, run as a pod. Values are read from the pods' /metrics on each request.

It stands in for prometheus-adapter, for one namespace, with the standard library alone. It serves what a
HorizontalPodAutoscaler queries: the list of metrics, and a metric of the pods of a selector or of a Service.
"""

import datetime
import json
import re
import ssl
import sys
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GROUP = "custom.metrics.k8s.io/v1beta2"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SERVICE = re.compile(rf"/apis/{GROUP}/namespaces/([^/]+)/services/([^/]+)/(.+)")
PODS = re.compile(rf"/apis/{GROUP}/namespaces/([^/]+)/pods/\*/(.+)")


def list_pods(namespace: str, selector: str) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"labelSelector": selector})
    request = urllib.request.Request(
        f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/pods?{query}",
        headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"},
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=5, context=context) as answer:
        items: list[dict[str, Any]] = json.load(answer)["items"]
    return items


def read_metric(address: str, name: str, label: str = "") -> float:
    """The metric summed over its series, or over those whose labels contain `label`, given as `name="value"`.

    The API allows no colons, so `vllm_…` stands for vLLM's `vllm:…`.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        page = answer.read().decode()
    exported = re.sub("^vllm_", "vllm:", name)
    series = re.findall(rf"^{re.escape(exported)}({{.*}})?\s+(\S+)", page, re.M)
    return sum(float(value) for labels, value in series if label in labels)


def metric_value(kind: str, namespace: str, owner: str, name: str, value: float) -> dict[str, Any]:
    return {
        "describedObject": {"kind": kind, "apiVersion": "v1", "namespace": namespace, "name": owner},
        "metric": {"name": name},
        "timestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": f"{round(value * 1000)}m",
    }


def pod_values(namespace: str, selector: str, name: str) -> list[dict[str, Any]]:
    values = []
    for pod in list_pods(namespace, selector):
        try:
            value = read_metric(f"{pod['status']['podIP']}:9400", name)
        except (KeyError, OSError):
            continue  # not running
        values.append(metric_value("Pod", namespace, pod["metadata"]["name"], name, value))
    return values


def service_value(namespace: str, service: str, selector: str, name: str) -> dict[str, Any]:
    """Read through the Service, so correct for one pod only. `selector` is `label=value`."""
    label, _, value = selector.partition("=")
    total = read_metric(f"{service}.{namespace}", name, f'{label}="{value}"')
    return metric_value("Service", namespace, service, name, total)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(url.path), urllib.parse.parse_qs(url.query)
        if asked := PODS.fullmatch(path):
            (selector,) = query.get("labelSelector", [""])
            self.answer_values(pod_values(asked[1], selector, asked[2]))
        elif asked := SERVICE.fullmatch(path):
            (selector,) = query["metricLabelSelector"]
            self.answer_values([service_value(asked[1], asked[2], selector, asked[3])])
        elif url.path == f"/apis/{GROUP}":
            resource = {"singularName": "", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
            resources = [resource | {"name": f"{owner}/any"} for owner in ("pods", "services")]
            self.answer({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": resources})
        else:
            self.send_error(404)

    def answer_values(self, items: list[dict[str, Any]]) -> None:
        self.answer({"kind": "MetricValueList", "apiVersion": GROUP, "metadata": {}, "items": items})

    def answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main(certificate: str, key: str) -> None:
    server = ThreadingHTTPServer(("", 8443), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
