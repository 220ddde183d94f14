"""Request traces of the engine: `llm_request` and its stages. Steps and ranks: step_spans.py, worker_spans.py.

It knows neither gRPC nor tensors: stages come from lifecycle events, context from the request's trace headers. Names
follow the GenAI semantic conventions, https://github.com/open-telemetry/semantic-conventions-genai.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from proa.contract import EngineCoreOutput, EngineCoreRequest, Event, EventType, FinishReason, SamplingParams
from proa.telemetry import make_tracer_provider
from proa_engine.core.executor import Executor
from proa_engine.step_spans import TracedExecutor

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACE_HEADERS = ("traceparent", "tracestate")
PROVIDER_NAME = "proa"
_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _Traced:
    span: Span
    num_known: int  # tokens that it came with
    num_chunks: int = 0  # steps that computed a part of those
    events: list[Event] = field(default_factory=list)


class EngineTracer:
    """Spans of requests in this engine: `llm_request` over `queue`, `prefill` and `decode`.

    Calls may come from any thread, but those for one request in order. Without a provider every call is a no-op.
    """

    def __init__(self, provider: "TracerProvider | None" = None, *, model_name: str = "") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("proa_engine") if provider else trace.NoOpTracer()
        self._model_name = model_name
        self._traced: dict[str, _Traced] = {}  # only sampled requests

    @classmethod
    def from_environment(cls, *, model_name: str) -> "EngineTracer":
        return cls(make_tracer_provider("proa-engine"), model_name=model_name)

    def start_request(self, request: EngineCoreRequest) -> dict[str, str]:
        """Begin `llm_request`, now, under the request's trace headers.

        Returns the headers that make it the parent of the workers' spans; empty unless the trace is sampled.
        They replace the request's own `trace_headers` on its way to the core.
        """
        if self._provider is None:
            return {}
        parent = _PROPAGATOR.extract(request.trace_headers, context=Context())
        attributes = _request_attributes(request, self._model_name)
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes)
        if not span.get_span_context().trace_flags.sampled:
            return {}
        self._traced[request.request_id] = _Traced(
            span, num_known=len(request.prompt_token_ids) + len(request.resumed_token_ids)
        )
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, trace.set_span_in_context(span, Context()))
        return headers

    def trace_steps(self, executor: Executor) -> Executor:
        """The executor, its steps traced where anything is."""
        if self._provider is None:
            return executor
        return TracedExecutor(executor, self._tracer, self._count_chunk)

    def observe_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Take in one step's lifecycle events, and end the spans of requests that finished."""
        if not self._traced:
            return
        for output in outputs:
            if (output.events or output.finish_reason) and (traced := self._traced.get(output.request_id)):
                traced.events.extend(output.events)
                if output.finish_reason is not None:
                    self._finish(output, output.finish_reason)

    def end_request(self, request_id: str, error_type: str, message: str = "") -> None:
        """End a request that no output will finish. Unknown ids are ignored."""
        if traced := self._traced.pop(request_id, None):
            end = time.time_ns()
            self._stages(traced, end, error_type)
            _fail(traced.span, error_type, message)
            traced.span.end(end)

    def shutdown(self) -> None:
        """End what is open, send what is left and stop. Waits no longer than the exporter's own timeout."""
        for request_id in list(self._traced):
            self.end_request(request_id, "shutdown")
        if self._provider is not None:
            self._provider.shutdown()

    def _count_chunk(self, request_id: str, num_known: int) -> None:
        """A preempted request that comes back with output of its own does not begin its prefill again."""
        traced = self._traced.get(request_id)
        if traced is not None and num_known == traced.num_known:
            traced.num_chunks += 1

    def _finish(self, output: EngineCoreOutput, reason: FinishReason) -> None:
        traced = self._traced.pop(output.request_id)
        error_type = reason.name.lower() if reason in (FinishReason.ABORT, FinishReason.ERROR) else None
        finished = [event.timestamp for event in traced.events if event.type is EventType.FINISHED]
        end = _nanoseconds(finished[-1]) if finished else time.time_ns()
        self._stages(traced, end, error_type, cached_tokens=output.num_cached_tokens)
        traced.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": output.num_prompt_tokens or 0,
                "gen_ai.usage.output_tokens": output.num_output_tokens or 0,
                "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens or 0,
                "gen_ai.response.finish_reasons": [reason.name.lower()],
            }
        )
        if error_type is not None:
            _fail(traced.span, error_type, output.error)
        traced.span.end(end)

    def _stages(self, traced: _Traced, end: int, error_type: str | None, cached_tokens: int | None = None) -> None:
        """Make the stages' spans from the events: each lasts from its own event to the next stage's, or to the end."""
        first: dict[EventType, int] = {}
        for event in traced.events:
            first.setdefault(event.type, _nanoseconds(event.timestamp))
        starts = [(name, first[kind]) for name, kind in _STAGES if kind in first]
        context = trace.set_span_in_context(traced.span, Context())
        for index, (name, start) in enumerate(starts):
            is_last = index == len(starts) - 1
            stop = end if is_last else starts[index + 1][1]
            span = self._tracer.start_span(name, context, start_time=start)
            if name == "prefill":
                span.set_attribute("proa.prefill.chunks", traced.num_chunks)
                if cached_tokens is not None:
                    span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached_tokens)
            for event in traced.events:
                moment = _nanoseconds(event.timestamp)
                if event.type in _MOMENTS and start <= moment and (moment < stop or is_last):
                    span.add_event(_MOMENTS[event.type], timestamp=moment)
            if is_last and error_type is not None:
                _fail(span, error_type, "")
            span.end(stop)


_STAGES = (("queue", EventType.QUEUED), ("prefill", EventType.SCHEDULED), ("decode", EventType.FIRST_TOKEN))
_MOMENTS = {
    EventType.PREEMPTED: "preempted",
    EventType.RESUMED: "resumed",
    EventType.FIRST_TOKEN: "first_token",
}


def _request_attributes(request: EngineCoreRequest, model_name: str) -> dict[str, AttributeValue]:
    params = request.sampling_params
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": PROVIDER_NAME,
        "gen_ai.request.model": model_name,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "proa.request.id": request.request_id,
    }
    if request.resumed_token_ids:
        attributes["proa.request.resumed_tokens"] = len(request.resumed_token_ids)
    return attributes | _optional_attributes(params)


def _optional_attributes(params: SamplingParams) -> dict[str, AttributeValue]:
    given = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _nanoseconds(timestamp: float) -> int:
    return int(timestamp * 1e9)


def _fail(span: Span, error_type: str, message: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR, message or None))
