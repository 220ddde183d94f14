"""A custom metrics API in one file, run as a pod: the values are the pods' own, read from their /metrics when asked.

What an adapter does on a real cluster, for one namespace and port, with the standard library alone. It answers the two
questions of a HorizontalPodAutoscaler: which metrics there are, and what one metric is for the pods of a selector.
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

GROUP = "custom.metrics.k8s.io/v1beta2"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PODS = re.compile(rf"/apis/{GROUP}/namespaces/([^/]+)/pods/\*/(.+)")


def list_pods(namespace: str, selector: str) -> list[dict]:
    query = urllib.parse.urlencode({"labelSelector": selector})
    request = urllib.request.Request(
        f"https://kubernetes.default.svc/api/v1/namespaces/{namespace}/pods?{query}",
        headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"},
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=5, context=context) as answer:
        return json.load(answer)["items"]


def read_metric(address: str, name: str) -> float:
    """The sum of the metric over its labels."""
    with urllib.request.urlopen(f"http://{address}:9400/metrics", timeout=5) as answer:
        page = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})?\s+(\S+)", page, re.M))


def metric_values(namespace: str, selector: str, name: str) -> list[dict]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    values = []
    for pod in list_pods(namespace, selector):
        try:
            value = read_metric(pod["status"]["podIP"], name)
        except (KeyError, OSError):
            continue  # not running yet, or not any more
        described = {"kind": "Pod", "apiVersion": "v1", "namespace": namespace, "name": pod["metadata"]["name"]}
        values.append(
            {
                "describedObject": described,
                "metric": {"name": name},
                "timestamp": now,
                "value": f"{round(value * 1000)}m",
            }
        )
    return values


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        asked = PODS.fullmatch(urllib.parse.unquote(url.path))
        if asked is not None:
            (selector,) = urllib.parse.parse_qs(url.query).get("labelSelector", [""])
            items = metric_values(asked[1], selector, asked[2])
            self.answer({"kind": "MetricValueList", "apiVersion": GROUP, "metadata": {}, "items": items})
        elif url.path == f"/apis/{GROUP}":
            resource = {"name": "pods/any", "singularName": "", "namespaced": True, "kind": "MetricValueList"}
            resources = [resource | {"verbs": ["get"]}]
            self.answer({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": resources})
        else:
            self.send_error(404)

    def answer(self, body: dict) -> None:
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
