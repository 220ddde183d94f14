"""TracedExecutor: a span for each step with sampled requests.

A step computes many requests, so its span is the root of a trace of its own, with links to the requests' spans. The
trace sampler decides about each such trace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Tracer

from proa.telemetry import extract_context, set_error
from proa_engine.core.executor import Executor, StepFuture
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.types import ModelRunnerOutput, NewRequestData, SchedulerOutput

OnChunk = Callable[[str, int], None]


@dataclass(slots=True)
class _Sampled:
    """A sampled request that the workers hold."""

    link: Link  # link to the engine's span
    num_tokens: int  # tokens known when the workers got the request
    num_left: int  # how many of them are not computed yet


class TracedExecutor:
    """Traces the steps of `executor`.

    `on_chunk(request_id, num_tokens)` is called when a step computes a part of the `num_tokens` tokens that a sampled
    request had when the workers got it.
    """

    def __init__(self, executor: Executor, tracer: Tracer, on_chunk: OnChunk) -> None:
        self._executor = executor
        self._tracer = tracer
        self._on_chunk = on_chunk
        self._sampled: dict[str, _Sampled] = {}
        self._span: Span | None = None  # span of the step whose tokens are not sampled yet

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._span = self._start_span(scheduler_output)
        self._executor.execute_model(scheduler_output)

    def draft_tokens(self) -> Mapping[int, Sequence[int]]:
        return self._executor.draft_tokens()

    def sample_tokens(self, masks: GrammarMasks | None = None) -> StepFuture:
        future, span = self._executor.sample_tokens(masks), self._span
        return future if span is None else _TracedFuture(future, span)

    def sleep(self, level: int) -> None:
        self._executor.sleep(level)

    def wake_up(self) -> None:
        self._executor.wake_up()

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _start_span(self, scheduler_output: SchedulerOutput) -> Span | None:
        """Return the step's span, None if the step has no sampled request."""
        if self._sampled:
            for request_id in (*scheduler_output.finished_request_ids, *scheduler_output.preempted_request_ids):
                self._sampled.pop(request_id, None)
        for new in scheduler_output.new_requests:
            if new.trace_headers:
                self._sampled[new.request_id] = _sampled(new)
        if not self._sampled:
            return None
        links = self._count_chunks(scheduler_output)
        if not links:
            return None
        attributes = {
            "proa.step.number": scheduler_output.step,
            "proa.step.tokens": scheduler_output.total_num_scheduled_tokens,
            "proa.step.running_requests": len(scheduler_output.num_scheduled_tokens),
            "proa.step.preempted_requests": len(scheduler_output.preempted_request_ids),
        }
        return self._tracer.start_span("step", Context(), attributes=attributes, links=links)

    def _count_chunks(self, scheduler_output: SchedulerOutput) -> list[Link]:
        """Return links to the step's sampled requests."""
        links = []
        for request_id, sampled in self._sampled.items():
            if num_tokens := scheduler_output.num_scheduled_tokens.get(request_id):
                links.append(sampled.link)
                if sampled.num_left > 0:
                    sampled.num_left -= num_tokens
                    self._on_chunk(request_id, sampled.num_tokens)
        return links


class _TracedFuture:
    """A step's result. The span ends when the result is on the host."""

    def __init__(self, future: StepFuture, span: Span) -> None:
        self._future = future
        self._span = span

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        try:
            result = self._future.result(timeout)
        except Exception as error:
            set_error(self._span, type(error).__qualname__, str(error))
            self._span.end()
            raise
        self._span.end()
        return result


def _sampled(new: NewRequestData) -> _Sampled:
    parent = trace.get_current_span(extract_context(new.trace_headers))
    num_tokens = len(new.token_ids)
    return _Sampled(Link(parent.get_span_context()), num_tokens, num_tokens - new.num_computed_tokens)
