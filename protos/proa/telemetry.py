"""Tracing for gateway and engine: OTLP export set up by OpenTelemetry's `OTEL_*` variables, W3C trace context, errors.

The exporters and the SDK are imported on first use. The global tracer provider is not touched.
"""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

PROVIDER_NAME = "proa"
"""`gen_ai.provider.name` of the GenAI semantic conventions."""

_PROPAGATOR = TraceContextTextMapPropagator()
_log = logging.getLogger(__name__)


def make_tracer_provider(service_name: str) -> "TracerProvider | None":
    """Return a provider that exports over OTLP (gRPC or HTTP), or None if the `OTEL_*` variables name no endpoint.

    `service_name` is used unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES names the service.
    """
    env = os.environ
    endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint or env.get("OTEL_TRACES_EXPORTER") == "none" or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    exporter = _make_exporter(protocol)
    if exporter is None:
        _log.warning("tracing disabled: OTLP protocol %r is not supported, only grpc and http/protobuf are", protocol)
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in env or "service.name=" in env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": service_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def extract_context(headers: Mapping[str, str]) -> Context:
    """Return the parent context in W3C trace context headers, which have lower-case names."""
    return _PROPAGATOR.extract(headers, context=Context())


def inject_headers(span: Span) -> dict[str, str]:
    """Return the W3C trace context headers that make `span` the parent; empty if it belongs to no trace."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, trace.set_span_in_context(span, Context()))
    return headers


def set_error(span: Span, error_type: str, message: str = "") -> None:
    """Mark a span as failed."""
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, message or None))


def _make_exporter(protocol: str) -> "SpanExporter | None":
    """Return None if the protocol is unknown."""
    match protocol:
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter()
        case "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return HttpExporter()
        case _:
            return None
