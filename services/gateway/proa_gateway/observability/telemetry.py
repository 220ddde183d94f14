"""Request traces of the gateway: a SERVER span a request, a child span a stage, a CLIENT span an attempt.

Names follow the GenAI semantic conventions, https://github.com/open-telemetry/semantic-conventions-genai.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import Span, SpanKind
from opentelemetry.util.types import AttributeValue

from proa.telemetry import PROVIDER_NAME, extract_context, inject_headers, make_tracer_provider, set_error
from proa_gateway.observability.outcome import Outcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class GatewayTracer:
    """Starts request traces. Without a provider spans are no-ops, and a client's trace context is still passed on."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("proa_gateway") if provider else trace.NoOpTracer()

    @classmethod
    def from_environment(cls) -> "GatewayTracer":
        return cls(make_tracer_provider("proa-gateway"))

    def start_request(self, headers: Mapping[str, str], route: str, key_name: str = "") -> "RequestTrace":
        """Start the span of one HTTP request.

        `headers` have lower-case names, `route` is the path template, `key_name` the name of the API key, if any.
        """
        parent = extract_context(headers)
        attributes = {"http.request.method": "POST", "http.route": route, "gen_ai.provider.name": PROVIDER_NAME}
        if key_name:
            attributes["proa.api_key.name"] = key_name
        span = self._tracer.start_span(f"POST {route}", parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracer, span, trace.set_span_in_context(span, Context()))

    @contextmanager
    def part(self, name: str, attributes: Mapping[str, AttributeValue]) -> Iterator[None]:
        """Span of a part (`images`) of the stage whose code calls this, of whichever request. Nothing outside of
        stages: not all requests have a trace."""
        stage = trace.get_current_span()
        if not stage.get_span_context().is_valid:
            yield
            return
        with RequestTrace(self._tracer, stage, get_current()).span(name, **attributes):
            yield

    def shutdown(self) -> None:
        """Export the remaining spans and stop. Waits at most for the exporter's timeout."""
        if self._provider is not None:
            self._provider.shutdown()


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The spans of one request. Call `finish` exactly once, however the request ended."""

    tracer: trace.Tracer
    root: Span  # of the request to the gateway
    context: Context  # of the span's children

    @property
    def is_recording(self) -> bool:
        return self.root.is_recording()

    @property
    def trace_id(self) -> str:
        """In hexadecimal; empty if the request belongs to no trace."""
        context = self.root.get_span_context()
        return trace.format_trace_id(context.trace_id) if context.is_valid else ""

    def set_request(self, *, operation: str, model: str, base_model: str) -> None:
        """Set what is known of a request before its prompt is made. `operation`: `gen_ai.operation.name` in the
        semantic conventions. `base_model`: the engines' model, which differs from `model` for an adapter."""
        values = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "proa.base_model": base_model if base_model != model else None,
        }
        self.root.set_attributes(_present(values))

    def set_parameters(self, values: Mapping[str, AttributeValue | None]) -> None:
        """Set a request's parameters: the attributes `gen_ai.request.*` by the rest of their names. None: not given."""
        self.root.set_attributes({f"gen_ai.request.{name}": value for name, value in _present(values).items()})

    @contextmanager
    def span(self, name: str, **attributes: AttributeValue) -> Iterator[Span]:
        """Span of a stage (`tokenize`, `admission`, `route`). An exception marks it as failed and is raised again."""
        span = self.tracer.start_span(name, self.context, attributes=attributes)
        token = attach(trace.set_span_in_context(span))
        try:
            yield span
        except BaseException as error:
            set_error(span, type(error).__name__, str(error))
            raise
        finally:
            span.end()
            detach(token)

    def start_attempt(self, engine: str, attempt: int = 1) -> "AttemptSpan":
        """Start the span of one attempt. `engine` is `host:port`; retries and failovers are further attempts."""
        span = self.tracer.start_span("Generate", self.context, SpanKind.CLIENT)
        if span.is_recording():
            span.set_attributes({**_call_attributes(engine), "proa.attempt": attempt})
        return AttemptSpan(span)

    def start_prefill(self, engine: str) -> "AttemptSpan":
        """Start the span of a request that computes the prompt on a prefill engine, for an attempt elsewhere."""
        span = self.tracer.start_span("Prefill", self.context, SpanKind.CLIENT)
        if span.is_recording():
            span.set_attributes({**_call_attributes(engine), "gen_ai.operation.name": "prefill"})
        return AttemptSpan(span)

    def add_event(self, name: str, attributes: Mapping[str, AttributeValue]) -> None:
        self.root.add_event(name, attributes)

    def finish(self, outcome: Outcome) -> None:
        """End the request's span."""
        if self.is_recording:
            values: dict[str, AttributeValue | None] = {
                "http.response.status_code": outcome.status,
                "gen_ai.response.id": outcome.response_id,
                "gen_ai.response.model": outcome.model or None,
                "gen_ai.usage.input_tokens": outcome.input_tokens,
                "gen_ai.usage.output_tokens": outcome.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
                "proa.embedded_tokens": outcome.embedded_tokens or None,
                "gen_ai.response.finish_reasons": list(outcome.finish_reasons) or None,
                "gen_ai.response.time_to_first_chunk": outcome.time_to_first_token,
            }
            self.root.set_attributes(_present(values))
            if outcome.error_type:
                set_error(self.root, outcome.error_type, outcome.message)
        self.root.end()


@dataclass(frozen=True, slots=True)
class AttemptSpan:
    """The CLIENT span of one request to an engine. Call `finish` exactly once."""

    span: Span

    def headers(self) -> dict[str, str]:
        """Return the `trace_headers` of the engine's request; empty if there is no trace."""
        return inject_headers(self.span)

    def set_kv_source(self, engine: str) -> None:
        """Set from which engine, `host:port`, the engine of this attempt may fetch blocks of the prompt."""
        self.span.set_attribute("proa.kv.source", engine)

    def set_fetched_tokens(self, num_tokens: int) -> None:
        """Set how many tokens of the prompt came from there."""
        self.span.set_attribute("proa.kv.fetched_tokens", num_tokens)

    def finish(self, error_type: str | None = None, message: str = "") -> None:
        if error_type is not None:
            set_error(self.span, error_type, message)
        self.span.end()


def _call_attributes(engine: str) -> dict[str, AttributeValue]:
    """Return the attributes of a request to an engine at `host:port`."""
    host, _, port = engine.rpartition(":")
    server: dict[str, AttributeValue] = {"server.address": host or engine}
    if port.isdigit():
        server["server.port"] = int(port)
    return {"rpc.system": "grpc", "rpc.service": "proa.engine.v1.EngineService", **server}


def _present(values: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: value for name, value in values.items() if value is not None}
