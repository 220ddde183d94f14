"""Where both hulls send their spans: OTLP over gRPC or HTTP, by OpenTelemetry's own `OTEL_*` variables.

The only file that knows OpenTelemetry's exporters, loaded on first use. The global tracer provider is never touched.
"""

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_log = logging.getLogger(__name__)


def make_tracer_provider(service_name: str) -> "TracerProvider | None":
    """A provider that exports over OTLP as the `OTEL_*` variables say, or None where they name no endpoint.

    `service_name` is used where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES names the service.
    """
    env = os.environ
    endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint or env.get("OTEL_TRACES_EXPORTER") == "none" or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    exporter = _make_exporter(protocol)
    if exporter is None:
        _log.warning("no traces: the OTLP protocol %r is not supported, grpc and http/protobuf are", protocol)
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = "OTEL_SERVICE_NAME" in env or "service.name=" in env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": service_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _make_exporter(protocol: str) -> "SpanExporter | None":
    """By the environment; None for a protocol that is not known."""
    match protocol:
        case "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            return GrpcExporter()
        case "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            return HttpExporter()
        case _:
            return None
