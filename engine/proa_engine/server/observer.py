"""RequestObserver: tells telemetry and metrics what happens to requests. Runs on the I/O thread."""

from dataclasses import dataclass

from proa.contract import EngineCoreRequest
from proa_engine.core.types import StepOutputs
from proa_engine.metrics import EngineMetrics
from proa_engine.telemetry import EngineTracer


@dataclass(frozen=True, slots=True)
class RequestObserver:
    tracer: EngineTracer
    metrics: EngineMetrics

    def started(self, request: EngineCoreRequest) -> dict[str, str]:
        """The trace headers to submit it with: they name the engine's span, or nothing if it is not sampled."""
        return self.tracer.start_request(request)

    def stepped(self, outputs: StepOutputs) -> None:
        self.metrics.observe_outputs(outputs)
        self.tracer.observe_outputs(outputs.outputs)

    def refused(self, reason: str) -> None:
        """A request that did not reach the core."""
        self.metrics.observe_rejection(reason)

    def rejected(self, request_id: str, reason: str, message: str) -> None:
        """A request that was started, and that the core did not take."""
        self.metrics.observe_rejection(reason)
        self.tracer.end_request(request_id, reason, message)
