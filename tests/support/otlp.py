"""A real OTLP/gRPC trace receiver, and what it received as plain values."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span; times in nanoseconds. `parent_id` is empty for a root."""

    service: str
    name: str
    kind: str  # SERVER, CLIENT, INTERNAL
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: dict[str, int]  # name -> time
    links: list[str]  # span ids
    failed: bool


@dataclass
class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on 127.0.0.1 while used as a context manager."""

    spans: list[ReceivedSpan] = field(default_factory=list)
    endpoint: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> "OtlpReceiver":
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(None).wait()

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process export to this receiver, within a fraction of a second."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:
        with self._changed:
            for resource in request.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self.spans += [_received(names["service.name"], span) for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, condition: Callable[[list[ReceivedSpan]], bool], seconds: float = 15.0) -> list[ReceivedSpan]:
        """All spans, once the condition holds of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.spans), seconds), [span.name for span in self.spans]
            return list(self.spans)

    def wait_for_names(self, *names: str, seconds: float = 15.0) -> dict[str, ReceivedSpan]:
        """The latest span of each name, once there is one of each."""
        spans = self.wait(lambda spans: {span.name for span in spans} >= set(names), seconds)
        return {span.name: span for span in spans}


def _received(service: str, span: trace_pb2.Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes={item.key: _value(item.value) for item in span.attributes},
        events={event.name: event.time_unix_nano for event in span.events},
        links=[link.span_id.hex() for link in span.links],
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
