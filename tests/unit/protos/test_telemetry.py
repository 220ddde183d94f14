"""Spans reach a collector by the protocol that OpenTelemetry's variables name."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from proa.telemetry import make_tracer_provider
from support.otlp import OtlpReceiver

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_TRACES_EXPORTER")


@contextmanager
def served_over_http(receiver: OtlpReceiver) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            receiver.Export(
                ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"]))), None
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def exported(receiver: OtlpReceiver) -> tuple[str, str]:
    """Make a span; returns its service and name as they arrive."""
    provider = make_tracer_provider("boat")
    assert provider is not None
    provider.get_tracer("test").start_span("crossing").end()
    provider.shutdown()
    (span,) = receiver.wait(lambda spans: len(spans) == 1)
    return span.service, span.name


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_over_grpc_which_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL", raising=False)
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        assert exported(receiver) == ("boat", "crossing")


def test_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = OtlpReceiver()
    with served_over_http(receiver) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        assert exported(receiver) == ("boat", "crossing")


def test_an_unsupported_protocol_is_logged_and_disables_tracing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    assert make_tracer_provider("boat") is None
    assert "'http/json' is not supported" in caplog.text
