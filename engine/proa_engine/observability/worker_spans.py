"""WorkerTracer: a span for each request that a rank computes, as a child of the engine's `llm_request`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from proa.telemetry import extract_context, make_tracer_provider
from proa_engine.core.types import SchedulerOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class WorkerTracer:
    """Makes the spans `worker.rank` of one rank."""

    def __init__(self, rank: int, provider: "TracerProvider", *, stage: int) -> None:
        """`stage` is the rank's pipeline stage."""
        self._rank = rank
        self._stage = stage
        self._provider = provider
        self._tracer = provider.get_tracer("proa_engine.worker")
        self._spans: dict[str, Span] = {}

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """End the spans of requests that finished or were preempted, and start those of new ones."""
        for request_id in scheduler_output.finished_request_ids:
            self.finish(request_id)
        for request_id in scheduler_output.preempted_request_ids:
            self.finish(request_id)
        for new in scheduler_output.new_requests:
            self.start(new.request_id, new.trace_headers)

    def start(self, request_id: str, headers: Mapping[str, str]) -> None:
        """Start a request's span, also when it is resumed after a preemption. Empty headers: not traced."""
        if not headers:
            return
        parent = extract_context(headers)
        attributes: dict[str, AttributeValue] = {
            "proa.worker.rank": self._rank,
            "proa.worker.stage": self._stage,
            "proa.request.id": request_id,
        }
        self._spans[request_id] = self._tracer.start_span("worker.rank", parent, attributes=attributes)

    def finish(self, request_id: str) -> None:
        """End the span of a request that finished or was preempted. Unknown IDs are ignored."""
        if span := self._spans.pop(request_id, None):
            span.end()

    def shutdown(self) -> None:
        for request_id in list(self._spans):
            self.finish(request_id)
        self._provider.shutdown()


class NoWorkerTracer:
    """The `WorkerTracer` of a rank whose traces are not exported. Makes no spans."""

    def update(self, scheduler_output: SchedulerOutput) -> None:
        pass

    def shutdown(self) -> None:
        pass


def make_worker_tracer(rank: int, stage: int = 0) -> WorkerTracer | NoWorkerTracer:
    """Make the tracer that the `OTEL_*` variables describe."""
    provider = make_tracer_provider("proa-engine-worker")
    return NoWorkerTracer() if provider is None else WorkerTracer(rank, provider, stage=stage)
