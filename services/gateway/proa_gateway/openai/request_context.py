"""RequestContext: the state of one generation request, from its arrival to the end of its response."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from proa_gateway.admission.auth import Caller
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import GatewayError
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import RequestTrace
from proa_gateway.openai.answer import ChoiceOutput
from proa_gateway.openai.endpoint_handler import EndpointHandler
from proa_gateway.openai.envelope import Prompt, Usage
from proa_gateway.openai.protocol import GenerationRequest
from proa_gateway.output_processor import OutputProcessor
from proa_gateway.routing.hints import RoutingHints


@dataclass(slots=True, eq=False)
class RequestContext:
    """Filled in while the request is served. `status` is the HTTP status; 499: the client disconnected."""

    handler: EndpointHandler
    caller: Caller
    trace: RequestTrace
    id: str
    session_id: str | None  # for session affinity
    response_headers: list[tuple[bytes, bytes]]  # more of them, until the response starts
    arrived: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)  # Unix seconds
    time_limit: float = 0.0  # seconds from `arrived` to the last token
    model: ServedModel | None = None
    max_tokens: int | None = None  # of a choice
    prompts: list[Prompt] = field(default_factory=list)
    routing_hints: list[RoutingHints] = field(default_factory=list)  # one for each prompt
    generation: Generation | None = None
    choices: Sequence[ChoiceOutput] = ()
    error: GatewayError | None = None
    status: int = 200

    @property
    def request(self) -> GenerationRequest:
        return self.handler.request

    @property
    def requested_model(self) -> str | None:
        return self.request.model

    @property
    def rank(self) -> int:
        """Order among the caller's requests in the gateway's queue, smaller first."""
        return self.request.priority or 0

    @property
    def num_prompts(self) -> int:
        return self.handler.num_prompts

    @property
    def seconds_left(self) -> float:
        return self.arrived + self.time_limit - time.perf_counter()

    @property
    def priority(self) -> int:
        """The engine's scheduling priority. With API keys it is the key's, so that clients cannot raise their own."""
        return self.caller.priority if self.caller.name else self.request.priority or 0

    @property
    def usage(self) -> Usage:
        """The usage so far. A prompt counts once, however many choices it has."""
        sequences = self._sequences
        firsts = sequences[:: max(1, len(sequences) // max(1, len(self.prompts)))]  # first choice of each prompt
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(sequence.num_tokens for sequence in sequences),
            cached_tokens=sum(sequence.num_cached_tokens for sequence in firsts),
            reasoning_tokens=self._num_reasoning_tokens,
        )

    @property
    def num_used_tokens(self) -> int:
        """Prompt and output tokens so far; 0 before the request is sent to an engine."""
        if self.generation is None:
            return 0
        usage = self.usage
        return usage.prompt_tokens + usage.completion_tokens

    @property
    def error_type(self) -> str:
        """The error's name in metrics and traces; empty if there was none."""
        if self.error is not None:
            return self.error.code or type(self.error).__name__
        return {200: "", 499: "client_disconnected"}.get(self.status, "internal_error")

    def report(self, metrics: GatewayMetrics) -> None:
        """End the trace and record the metrics. Call once, at the end of the request."""
        usage, sequences = self.usage, self._sequences
        first = self.generation.first_token_at if self.generation else None
        first_token = first - self.arrived if first is not None else None
        model = self.model.name if self.model else ""
        self.trace.finish(
            status=self.status,
            error_type=self.error_type or None,
            message=self.error.message if self.error else "",
            response_id=self.id,
            response_model=model or None,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            finish_reasons=[each.finish_reason for each in sequences if each.finish_reason is not None],
            time_to_first_chunk=first_token,
        )
        metrics.observe_generation(
            operation=self.handler.operation,
            model=model,
            duration=time.perf_counter() - self.arrived,
            time_to_first_token=first_token,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            num_choices=self.request.n or 1,
            max_tokens=self.max_tokens,
            error_type=self.error_type,
        )
        for sequence in sequences:
            metrics.observe_finish(model, self._finish_reason(sequence))

    @property
    def _num_reasoning_tokens(self) -> int | None:
        counts = [count for choice in self.choices if (count := choice.num_reasoning_tokens) is not None]
        return sum(counts) if counts else None

    @property
    def _sequences(self) -> list[OutputProcessor]:
        return self.generation.sequences if self.generation else []

    def _finish_reason(self, sequence: OutputProcessor) -> str:
        """The finish reason that the client received. A response that is not streamed has one only if all of its
        sequences finished."""
        if sequence.finish_reason is not None and (self.status == 200 or self.request.stream):
            return sequence.finish_reason
        return "client_disconnected" if self.status == 499 else "error"
