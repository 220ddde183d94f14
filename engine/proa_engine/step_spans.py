"""Step spans: one for each step in which sampled requests took part, as a trace of its own that links to them.

A step belongs to many requests, so it is nobody's child. It stands between the core and the executor, so that neither
knows of it, and it is not there where nothing is traced. Bounded by the requests that are sampled, and by the sampler,
which sees each step as a root.
"""

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proa_engine.core.executor import Executor, StepFuture
from proa_engine.core.types import ModelRunnerOutput, NewRequestData, SchedulerOutput

OnChunk = Callable[[str, int], None]

_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(slots=True)
class _Sampled:
    """A sampled request that the workers hold."""

    link: Link  # to the engine's span
    num_known: int  # tokens known when it joined
    num_left: int  # of those, to be computed yet


class TracedExecutor:
    """An executor whose steps are traced. `on_chunk` is told whenever a step computes a part of the tokens that a
    sampled request joined with: its id, and how many those are."""

    def __init__(self, executor: Executor, tracer: Tracer, on_chunk: OnChunk) -> None:
        self._executor = executor
        self._tracer = tracer
        self._on_chunk = on_chunk
        self._sampled: dict[str, _Sampled] = {}
        self._span: Span | None = None  # of the step whose sampling has not been asked for

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._span = self._begin(scheduler_output)
        self._executor.execute_model(scheduler_output)

    def sample_tokens(self) -> StepFuture:
        future, span = self._executor.sample_tokens(), self._span
        return future if span is None else _TracedFuture(future, span)

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _begin(self, plan: SchedulerOutput) -> Span | None:
        """The step's span, begun; None where no sampled request takes part."""
        if self._sampled:
            for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
                self._sampled.pop(request_id, None)
        for new in plan.new_requests:
            if new.trace_headers:
                self._sampled[new.request_id] = _sampled(new)
        if not self._sampled:
            return None
        links = self._count_chunks(plan)
        if not links:
            return None
        attributes = {
            "proa.step.number": plan.step,
            "proa.step.tokens": plan.total_num_scheduled_tokens,
            "proa.step.running_requests": len(plan.num_scheduled_tokens),
            "proa.step.preempted_requests": len(plan.preempted_request_ids),
        }
        return self._tracer.start_span("step", Context(), attributes=attributes, links=links)

    def _count_chunks(self, plan: SchedulerOutput) -> list[Link]:
        """Links to the sampled requests that take part."""
        links = []
        for request_id, sampled in self._sampled.items():
            if num_tokens := plan.num_scheduled_tokens.get(request_id):
                links.append(sampled.link)
                if sampled.num_left > 0:
                    sampled.num_left -= num_tokens
                    self._on_chunk(request_id, sampled.num_known)
        return links


class _TracedFuture:
    """A step's result; its span ends when it is on the host."""

    def __init__(self, future: StepFuture, span: Span) -> None:
        self._future = future
        self._span = span

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        try:
            result = self._future.result(timeout)
        except Exception as error:
            self._span.set_attribute("error.type", type(error).__qualname__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
            self._span.end()
            raise
        self._span.end()
        return result


def _sampled(new: NewRequestData) -> _Sampled:
    parent = trace.get_current_span(_PROPAGATOR.extract(new.trace_headers, context=Context()))
    num_known = len(new.token_ids)
    return _Sampled(Link(parent.get_span_context()), num_known, num_known - new.num_computed_tokens)
