"""Tracing in the cluster: one trace spans gateway, engine and a worker's container.

The spans go to a receiver of our own (support/otlp.py), and to the collector of k8s/collector.yaml if its image can be
pulled. PROA_E2E_COLLECTOR_IMAGE replaces that image.
"""

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.chat import ask
from support.kube import Release, eventually, run
from support.span_receiver import Span, span_receiver

COLLECTOR = Path(__file__).parents[2] / "k8s" / "collector.yaml"
CANNOT_PULL = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"}
_LOGGED_SPAN = re.compile(
    r"Trace ID +: (?P<trace_id>\w+)\n\s+Parent ID +: (?P<parent_id>\w*)\n"
    r"\s+ID +: (?P<span_id>\w+)\n\s+Name +: (?P<name>.+)"
)


@contextmanager
def collector(release: Release) -> Iterator[tuple[str, Callable[[], list[Span]]]]:
    """The collector of k8s/collector.yaml, which logs spans. Skips the test if its image cannot be pulled."""

    def ready() -> bool:
        pods = release.get("pods", "--selector=app=otel-collector")["items"]
        return any(is_ready(status) for pod in pods for status in pod["status"].get("containerStatuses", []))

    def is_ready(status: Any) -> bool:
        waiting = status["state"].get("waiting", {})
        if waiting.get("reason") in CANNOT_PULL:
            pytest.skip(f"not run: image {status['image']} cannot be pulled: {waiting.get('message')}")
        return bool(status["ready"])

    def spans() -> list[Span]:
        log = release.kubectl("logs", "deployment/otel-collector", "--tail=-1")
        return [
            Span(found["trace_id"], found["span_id"], found["parent_id"], found["name"])
            for found in _LOGGED_SPAN.finditer(log)
        ]

    manifest = COLLECTOR.read_text()
    if image := os.environ.get("PROA_E2E_COLLECTOR_IMAGE"):
        manifest = re.sub(r"image: .*", f"image: {image}", manifest)
    run("kubectl", "--namespace", release.namespace, "apply", "--filename=-", stdin=manifest)
    eventually("the collector is ready", ready, seconds=180)
    yield "http://otel-collector:4317", spans


@pytest.mark.parametrize("destination", [span_receiver, collector])
def test_one_trace_runs_from_the_http_request_to_the_sidecar(release: Release, destination: Any) -> None:
    with destination(release) as (endpoint, received):
        release.install(
            otel__OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
            engines__builtin__tensorParallelSize="2",
            engines__builtin__tensorParallel__mode="sidecar",
        )
        trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
        with release.client() as client:
            assert "Paris" in ask(client, headers={"traceparent": f"00-{trace_id}-{caller}-01"})
        route = "POST /v1/chat/completions"
        stages = ["tokenize", "admission", "route", "Generate", "llm_request", "queue", "prefill", "decode"]
        expected = sorted([route, *stages, "worker.rank", "worker.rank"])

        def whole_trace() -> list[Span] | None:
            found = [span for span in received() if span.trace_id == trace_id]
            return found if sorted(span.name for span in found) == expected else None

        spans = eventually("the whole trace has been received", whole_trace, seconds=60)
    names = {span.span_id: span.name for span in spans}
    assert [(span.name, span.parent_id) for span in spans if span.parent_id not in names] == [(route, caller)]
    assert {names[span.parent_id] for span in spans if span.name == "worker.rank"} == {"llm_request"}
