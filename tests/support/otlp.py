"""An OTLP/gRPC trace receiver that keeps spans as plain values. Run as a program, it prints them as lines of JSON."""

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
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
    """Listens on `address` while used as a context manager; `endpoint` is its URL."""

    address: str = "127.0.0.1:0"
    spans: list[ReceivedSpan] = field(default_factory=list)
    endpoint: str = ""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> "OtlpReceiver":
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port(self.address)
        self.endpoint = f"http://{self.address.rpartition(':')[0]}:{port}"
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop(None).wait()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process exports its spans to this receiver every 100 ms."""
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
        """Wait until the condition holds, and return all spans."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.spans), seconds), [span.name for span in self.spans]
            return list(self.spans)


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


def main(address: str) -> None:
    """Print each received span as a line of JSON, until the process is killed."""
    with OtlpReceiver(address=address) as receiver:
        printed = 0
        while True:
            for span in receiver.spans[printed:]:
                print(json.dumps(asdict(span)), flush=True)
                printed += 1
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
