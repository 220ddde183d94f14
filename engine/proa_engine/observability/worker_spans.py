"""WorkerTracer: a span for each request that a rank computes, as a child of the engine's `llm_request`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from proa.telemetry import extract_context, make_tracer_provider
from proa_engine.core.types import SchedulerOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class WorkerTracer:
    """Makes the spans `worker.rank` of one rank. Without a provider all methods are no-ops."""

    def __init__(self, rank: int, provider: "TracerProvider | None" = None, *, stage: int = 0) -> None:
        """`stage` is the rank's pipeline stage."""
        self._rank = rank
        self._stage = stage
        self._provider = provider
        self._tracer = provider.get_tracer("proa_engine.worker") if provider else trace.NoOpTracer()
        self._spans: dict[str, Span] = {}

    @classmethod
    def from_environment(cls, rank: int, stage: int = 0) -> "WorkerTracer":
        return cls(rank, make_tracer_provider("proa-engine-worker"), stage=stage)

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
        if not headers or self._provider is None:
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
        if self._provider is not None:
            self._provider.shutdown()
