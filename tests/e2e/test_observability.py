"""A request's life, seen by a real collector in the cluster: one trace over gateway, engine and a worker's container.

The collector is k8s/collector.yaml; PROA_E2E_COLLECTOR_IMAGE names another image of it, for clusters without the
public one.
"""

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from support.kube import Release, eventually, run

COLLECTOR = Path(__file__).parents[2] / "k8s" / "collector.yaml"
_SPAN = re.compile(
    r"Trace ID +: (?P<trace>\w+)\n\s+Parent ID +: (?P<parent>\w*)\n\s+ID +: (?P<id>\w+)\n\s+Name +: (?P<name>.+)"
)


@dataclass(frozen=True, slots=True)
class Span:
    span_id: str
    parent_id: str
    name: str


@pytest.fixture(scope="module")
def collector(release: Release) -> None:
    manifest = COLLECTOR.read_text()
    if image := os.environ.get("PROA_E2E_COLLECTOR_IMAGE"):
        manifest = re.sub(r"image: .*", f"image: {image}", manifest)
    run("kubectl", "--namespace", release.namespace, "apply", "--filename=-", stdin=manifest)
    release.kubectl("rollout", "status", "deployment/otel-collector", "--timeout=3m")
    release.install(
        otel__OTEL_EXPORTER_OTLP_ENDPOINT="http://otel-collector:4317",
        engines__builtin__tensorParallelSize="2",
        engines__builtin__tensorParallel__mode="sidecar",
    )


def spans_of(release: Release, trace_id: str) -> list[Span]:
    log = release.kubectl("logs", "deployment/otel-collector", "--tail=-1")
    return [
        Span(found["id"], found["parent"], found["name"]) for found in _SPAN.finditer(log) if found["trace"] == trace_id
    ]


def test_one_trace_runs_from_the_http_request_to_the_sidecar(release: Release, collector: None, client: OpenAI) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    stream = client.chat.completions.create(
        model="proa-builtin",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stream=True,
        extra_headers={"traceparent": f"00-{trace_id}-{caller}-01"},
    )
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    route = "POST /v1/chat/completions"
    stages = ["tokenize", "admission", "route", "Generate", "llm_request", "queue", "prefill", "decode"]
    wanted = sorted([route, *stages, "worker.rank", "worker.rank"])
    spans = eventually(
        "the collector has the whole trace",
        lambda: (found := spans_of(release, trace_id)) and sorted(span.name for span in found) == wanted and found,
        seconds=60,
    )
    names = {span.span_id: span.name for span in spans}
    assert [(span.name, span.parent_id) for span in spans if span.parent_id not in names] == [(route, caller)]
    assert {names[span.parent_id] for span in spans if span.name == "worker.rank"} == {"llm_request"}
