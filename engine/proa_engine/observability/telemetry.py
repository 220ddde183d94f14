"""Request traces of the engine: the span `llm_request` and its stages, from the requests' lifecycle events.

Names follow the GenAI semantic conventions, https://github.com/open-telemetry/semantic-conventions-genai. Spans of
steps are in step_spans.py, spans of ranks in worker_spans.py.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind
from opentelemetry.util.types import AttributeValue

from proa.contract import (
    EngineCoreOutput,
    EngineCoreRequest,
    Event,
    EventType,
    FinishReason,
    KvFetch,
    KvLoad,
    SamplingParams,
)
from proa.telemetry import PROVIDER_NAME, extract_context, inject_headers, make_tracer_provider, set_error
from proa_engine.core.executor import Executor
from proa_engine.observability.step_spans import TracedExecutor

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


TRACE_HEADERS = ("traceparent", "tracestate")
_STAGES = (("queue", EventType.QUEUED), ("prefill", EventType.SCHEDULED), ("decode", EventType.FIRST_TOKEN))
_MOMENTS = {
    EventType.PREEMPTED: "preempted",
    EventType.RESUMED: "resumed",
    EventType.FIRST_TOKEN: "first_token",
}


@dataclass(slots=True)
class _TracedRequest:
    span: Span
    num_prompt_tokens: int  # with tokens resumed from another engine
    num_chunks: int = 0  # steps that computed a part of the prompt
    events: list[Event] = field(default_factory=list)


class EngineTracer:
    """Makes the span `llm_request` with the children `queue`, `prefill` and `decode` for each sampled request.

    Methods may be called from any thread, those for one request in order.
    """

    def __init__(self, provider: "TracerProvider", *, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("proa_engine")
        self._model_name = model_name
        self._traced: dict[str, _TracedRequest] = {}  # only sampled requests

    def start_request(self, request: EngineCoreRequest) -> dict[str, str]:
        """Start `llm_request` as a child of the request's trace headers.

        Return the headers for the workers' spans, which replace the request's own; empty unless the trace is sampled.
        """
        parent = extract_context(request.trace_headers)
        attributes = _request_attributes(request, self._model_name)
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes)
        if not span.get_span_context().trace_flags.sampled:
            return {}
        self._traced[request.request_id] = _TracedRequest(
            span, num_prompt_tokens=len(request.prompt_token_ids) + len(request.resumed_token_ids)
        )
        return inject_headers(span)

    def trace_steps(self, executor: Executor) -> Executor:
        """Wrap the executor to trace its steps."""
        return TracedExecutor(executor, self._tracer, self._count_chunk)

    def observe_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Record the lifecycle events of one step and end the spans of finished requests."""
        if not self._traced:
            return
        for output in outputs:
            if (output.events or output.finish_reason) and (traced := self._traced.get(output.request_id)):
                traced.events.extend(output.events)
                if output.finish_reason is not None:
                    self._finish(output, output.finish_reason)

    def end_request(self, request_id: str, error_type: str, message: str = "") -> None:
        """End a request that fails without an output. Unknown IDs are ignored."""
        if traced := self._traced.pop(request_id, None):
            end = time.time_ns()
            self._stages(traced, end, error_type)
            set_error(traced.span, error_type, message)
            traced.span.end(end)

    def shutdown(self) -> None:
        """End all spans, export them and stop. Waits at most for the exporter's timeout."""
        for request_id in list(self._traced):
            self.end_request(request_id, "shutdown")
        self._provider.shutdown()

    def _count_chunk(self, request_id: str, num_tokens: int) -> None:
        """Count a prefill step. Steps that compute a preempted request again are not counted: it then has more tokens
        than its prompt."""
        traced = self._traced.get(request_id)
        if traced is not None and num_tokens == traced.num_prompt_tokens:
            traced.num_chunks += 1

    def _finish(self, output: EngineCoreOutput, reason: FinishReason) -> None:
        traced = self._traced.pop(output.request_id)
        error_type = reason.public_name if reason in (FinishReason.ABORT, FinishReason.ERROR) else None
        finished = [event.timestamp for event in traced.events if event.type is EventType.FINISHED]
        end = _nanoseconds(finished[-1]) if finished else time.time_ns()
        self._stages(traced, end, error_type, cached_tokens=output.num_cached_tokens)
        if output.fetch is not None:
            self._fetch_span(traced, output.fetch, tier="engine")
        if output.disk_read is not None:
            self._fetch_span(traced, output.disk_read, tier="disk")
        if output.load is not None:
            self._load_span(traced, output.load)
        traced.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": output.num_prompt_tokens or 0,
                "gen_ai.usage.output_tokens": output.num_output_tokens or 0,
                "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens or 0,
                "gen_ai.response.finish_reasons": [reason.public_name],
            }
        )
        if error_type is not None:
            set_error(traced.span, error_type, output.error)
        traced.span.end(end)

    def _fetch_span(self, traced: _TracedRequest, fetch: KvFetch, tier: str) -> None:
        """Make the span of the time in which the request waited for blocks from another engine, or from disk."""
        context = trace.set_span_in_context(traced.span, Context())
        span = self._tracer.start_span("kv.fetch", context, start_time=_nanoseconds(fetch.started))
        amounts = {"proa.kv.fetched_tokens": fetch.num_tokens, "proa.kv.fetched_bytes": fetch.num_bytes}
        span.set_attributes({"proa.kv.tier": tier, **amounts})
        if fetch.error:
            set_error(span, "fetch", fetch.error)
        span.end(_nanoseconds(fetch.ended))

    def _load_span(self, traced: _TracedRequest, load: KvLoad) -> None:
        """Make the span of the time in which the request waited for blocks from host memory."""
        context = trace.set_span_in_context(traced.span, Context())
        span = self._tracer.start_span("kv.load", context, start_time=_nanoseconds(load.started))
        span.set_attribute("proa.kv.loaded_tokens", load.num_tokens)
        span.end(_nanoseconds(load.ended))

    def _stages(
        self, traced: _TracedRequest, end: int, error_type: str | None, cached_tokens: int | None = None
    ) -> None:
        """Make the spans of the request's stages. Each lasts from its own event to the next stage's, or to `end`."""
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
                set_error(span, error_type)
            span.end(stop)


class NoEngineTracer:
    """The `EngineTracer` of an engine whose traces are not exported. Makes no spans."""

    def start_request(self, request: EngineCoreRequest) -> dict[str, str]:
        return {}

    def trace_steps(self, executor: Executor) -> Executor:
        return executor

    def observe_outputs(self, outputs: Iterable[EngineCoreOutput]) -> None:
        pass

    def end_request(self, request_id: str, error_type: str, message: str = "") -> None:
        pass

    def shutdown(self) -> None:
        pass


def make_engine_tracer(model_name: str) -> EngineTracer | NoEngineTracer:
    """Make the tracer that the `OTEL_*` variables describe."""
    provider = make_tracer_provider("proa-engine")
    return NoEngineTracer() if provider is None else EngineTracer(provider, model_name=model_name)


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
    if request.prefill_only:
        attributes["proa.request.prefill_only"] = True
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
