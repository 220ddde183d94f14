"""Request traces of the gateway: one SERVER span a request, a child for each stage, one CLIENT span an attempt.

It knows neither HTTP nor gRPC: headers come and go as mappings, and contexts are passed explicitly.
Names follow the GenAI semantic conventions, https://github.com/open-telemetry/semantic-conventions-genai.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from proa.telemetry import make_tracer_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PROVIDER_NAME = "proa"
_PROPAGATOR = TraceContextTextMapPropagator()


class GatewayTracer:
    """Starts request traces. Without a provider every call is a cheap no-op, and a caller's context still passes on."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("proa_gateway") if provider else trace.NoOpTracer()

    @classmethod
    def from_environment(cls) -> "GatewayTracer":
        return cls(make_tracer_provider("proa-gateway"))

    def start_request(self, headers: Mapping[str, str], route: str, key_name: str = "") -> "RequestTrace":
        """Begin the trace of one HTTP request. `headers` have lower-case names; `route` is the path's template;
        `key_name` is the API key's, where keys are asked for."""
        parent = _PROPAGATOR.extract(headers, context=Context())
        attributes = {"http.request.method": "POST", "http.route": route, "gen_ai.provider.name": PROVIDER_NAME}
        if key_name:
            attributes["proa.api_key.name"] = key_name
        span = self._tracer.start_span(f"POST {route}", parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracer, span)

    def shutdown(self) -> None:
        """Send what is left and stop. Waits no longer than the exporter's own timeout."""
        if self._provider is not None:
            self._provider.shutdown()


class RequestTrace:
    """One request's spans. `finish` must be called exactly once, whatever became of the request."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, Context())

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """Thirty-two hexadecimal digits; all zero where there is no trace."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def set_request(
        self,
        *,
        operation: str,
        model: str,
        stream: bool = False,
        n: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        """Describe the request once it is parsed. `operation` is `chat` or `text_completion`. None: not given."""
        if not self.is_recording:
            return
        values: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "gen_ai.request.stream": stream,
            "gen_ai.request.choice.count": n if n != 1 else None,
            "gen_ai.request.max_tokens": max_tokens,
            "gen_ai.request.temperature": temperature,
            "gen_ai.request.top_p": top_p,
            "gen_ai.request.top_k": top_k,
            "gen_ai.request.seed": seed,
            "gen_ai.request.frequency_penalty": frequency_penalty,
            "gen_ai.request.presence_penalty": presence_penalty,
            "gen_ai.request.stop_sequences": list(stop) or None,
        }
        self._span.set_attributes(_present(values))

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        """A stage of the request (`tokenize`, `admission`, `route`). An exception marks it failed and goes on."""
        span = self._tracer.start_span(name, self._context, attributes=attributes)
        try:
            yield span
        except BaseException as error:
            _fail(span, type(error).__name__, str(error))
            raise
        finally:
            span.end()

    def start_attempt(self, engine: str, attempt: int = 1) -> "Attempt":
        """One sending of the request to one engine, `host:port`. A retry or failover is another attempt."""
        span = self._tracer.start_span("Generate", self._context, SpanKind.CLIENT)
        if span.is_recording():
            host, _, port = engine.rpartition(":")
            span.set_attributes({"rpc.system": "grpc", "rpc.service": "proa.engine.v1.EngineService"})
            span.set_attributes({"server.address": host or engine, "proa.attempt": attempt})
            if port.isdigit():
                span.set_attribute("server.port", int(port))
        return Attempt(span)

    def inject(self) -> dict[str, str]:
        """W3C headers that make the request's span the parent; `Attempt.inject` is what goes to an engine."""
        return _inject(self._context)

    def add_event(self, name: str, **attributes: AttributeValue) -> None:
        self._span.add_event(name, attributes)

    def finish(
        self,
        *,
        status: int,
        error_type: str | None = None,
        message: str = "",
        response_id: str | None = None,
        response_model: str | None = None,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
        finish_reasons: Sequence[str] = (),
        time_to_first_chunk: float | None = None,
    ) -> None:
        """End the request's span. `error_type` set: the request failed or was aborted, `message` says how."""
        if self.is_recording:
            values: dict[str, AttributeValue | None] = {
                "http.response.status_code": status,
                "gen_ai.response.id": response_id,
                "gen_ai.response.model": response_model,
                "gen_ai.usage.input_tokens": input_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
                "gen_ai.usage.cache_read.input_tokens": cached_tokens,
                "gen_ai.response.finish_reasons": list(finish_reasons) or None,
                "gen_ai.response.time_to_first_chunk": time_to_first_chunk,
            }
            self._span.set_attributes(_present(values))
            if error_type is not None:
                _fail(self._span, error_type, message)
        self._span.end()


class Attempt:
    """One CLIENT span. `finish` must be called exactly once."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def inject(self) -> dict[str, str]:
        """Headers for gRPC metadata and `EngineCoreRequest.trace_headers`. Empty where there is no trace."""
        return _inject(trace.set_span_in_context(self._span, Context()))

    def finish(self, error_type: str | None = None, message: str = "") -> None:
        if error_type is not None:
            _fail(self._span, error_type, message)
        self._span.end()


def _inject(context: Context) -> dict[str, str]:
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, context)
    return headers


def _present(values: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: value for name, value in values.items() if value is not None}


def _fail(span: Span, error_type: str, message: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, message or None))
