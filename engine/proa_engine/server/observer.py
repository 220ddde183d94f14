"""RequestObserver: reports requests to tracing and metrics. Runs on the I/O thread."""

from dataclasses import dataclass

from proa.contract import EngineCoreRequest
from proa_engine.core.types import StepOutputs
from proa_engine.observability.metrics import EngineMetrics
from proa_engine.observability.telemetry import EngineTracer


@dataclass(frozen=True, slots=True)
class RequestObserver:
    tracer: EngineTracer
    metrics: EngineMetrics

    def on_request(self, request: EngineCoreRequest) -> dict[str, str]:
        """Start the request's span. Returns the trace headers that name it, empty if the trace is not sampled."""
        self.metrics.observe_request(request)
        return self.tracer.start_request(request)

    def on_outputs(self, outputs: StepOutputs) -> None:
        self.metrics.observe_outputs(outputs)
        self.tracer.observe_outputs(outputs.outputs)

    def on_refused(self, reason: str) -> None:
        """Count a request that was refused before `on_request`."""
        self.metrics.observe_rejection(reason)

    def on_rejected(self, request_id: str, reason: str, message: str) -> None:
        """Count a request that the core rejected, and end its span."""
        self.metrics.observe_rejection(reason, request_id)
        self.tracer.end_request(request_id, reason, message)
