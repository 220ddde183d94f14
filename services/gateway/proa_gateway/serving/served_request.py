"""ServedRequest: the state of one request that engines work for, from its arrival to the end of its response."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from proa_gateway.admission.auth import Caller
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import EngineUnavailable, GatewayError, QueueTimeout, RateLimited, ShuttingDown
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import RequestTrace
from proa_gateway.output.deltas import EngineSequence
from proa_gateway.routing.hints import RoutingHints
from proa_gateway.serving.answer import ChoiceOutput
from proa_gateway.serving.endpoint_handler import EndpointHandler
from proa_gateway.serving.envelope import Prompt, Usage
from proa_gateway.serving.generation_request import GenerationRequest

# Errors that reject a request before an engine has it, by their name in metrics; `AdmissionControl` counts its own.
_REJECTIONS: dict[type[GatewayError], str] = {
    EngineUnavailable: "no_engine",
    QueueTimeout: "queue_timeout",
    RateLimited: "rate_limit",
    ShuttingDown: "draining",
}
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class ServedRequest(ABC):
    """Filled in while the request is served. `status` is the HTTP status; 499: the client disconnected."""

    caller: Caller
    trace: RequestTrace
    id: str
    session_id: str | None  # for session affinity
    arrived: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)  # Unix seconds
    time_limit: float = 0.0  # seconds from `arrived` to the end
    model: ServedModel | None = None
    max_tokens: int | None = None  # of a choice
    prompts: Sequence[Prompt] = ()
    generation: Generation | None = None
    error: GatewayError | None = None
    status: int = 200

    @property
    @abstractmethod
    def operation(self) -> str:
        """`gen_ai.operation.name` in OpenTelemetry's semantic conventions."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Order among the caller's requests in the gateway's queue, smaller first."""

    @property
    def num_choices(self) -> int:
        """Of a prompt."""
        return 1

    @property
    def num_reasoning_tokens(self) -> int | None:
        """So far. None: reasoning is not distinguished from the rest."""
        return None

    @property
    def priority(self) -> int:
        """The engine's scheduling priority. With API keys it is the key's, so that clients cannot raise their own."""
        return self.caller.priority if self.caller.name else self.rank

    @property
    def seconds_left(self) -> float:
        return self.arrived + self.time_limit - time.perf_counter()

    @property
    def usage(self) -> Usage:
        """The usage so far. A prompt counts once, however many choices it has."""
        sequences = self.sequences
        firsts = sequences[:: max(1, len(sequences) // max(1, len(self.prompts)))]  # first choice of each prompt
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(sequence.num_tokens for sequence in sequences),
            cached_tokens=sum(sequence.num_cached_tokens for sequence in firsts),
            reasoning_tokens=self.num_reasoning_tokens,
            image_tokens=sum(image.num_tokens for prompt in self.prompts for image in prompt.images),
        )

    @property
    def num_used_tokens(self) -> int:
        """Prompt and output tokens so far; 0 before the request is sent to an engine."""
        if self.generation is None:
            return 0
        usage = self.usage
        return usage.prompt_tokens + usage.completion_tokens

    @property
    def sequences(self) -> Sequence[EngineSequence]:
        return self.generation.sequences if self.generation else []

    @property
    def error_type(self) -> str:
        """The error's name in metrics and traces; empty if there was none."""
        if self.error is not None:
            return self.error.code or type(self.error).__name__
        return {200: "", 499: "client_disconnected"}.get(self.status, "internal_error")

    @contextmanager
    def observed(self, metrics: GatewayMetrics, *, slow_reader: float) -> Iterator[None]:
        """Serve the request in this context, once: it records errors, and reports metrics and the trace at the end.

        `slow_reader`: the seconds after which writing raises `TimeoutError`, which ends here.
        """
        metrics.requests_in_flight.inc()
        try:
            yield
        except GatewayError as error:
            self.error, self.status = error, error.status
            if reason := _REJECTIONS.get(type(error)):
                metrics.observe_rejection(reason)
            raise
        except asyncio.CancelledError:
            self.status = 499
            metrics.observe_abort()
            raise
        except TimeoutError:
            self.status = 499
            metrics.observe_abort()
            _log.warning("%s: aborted, the client has read nothing for %g s", self.id, slow_reader)
        except BaseException:
            self.status = 500
            raise
        finally:
            metrics.requests_in_flight.dec()
            self._report(metrics)

    def _report(self, metrics: GatewayMetrics) -> None:
        usage, sequences = self.usage, self.sequences
        first = self.generation.first_token_at if self.generation else None
        first_token = first - self.arrived if first is not None else None
        model, base_model = (self.model.name, self.model.base_name) if self.model else ("", "")
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
            operation=self.operation,
            model=model,
            base_model=base_model,
            duration=time.perf_counter() - self.arrived,
            time_to_first_token=first_token,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            longest_output=max((each.num_tokens for each in sequences), default=0),
            cached_tokens=usage.cached_tokens,
            num_choices=self.num_choices,
            max_tokens=self.max_tokens,
            error_type=self.error_type,
        )
        for reason, count in Counter(map(self.finish_reason, sequences)).items():
            metrics.observe_finish(model, base_model, reason, count)
        if self.caller.name:
            metrics.observe_key(
                self.caller.name,
                self.status,
                input_tokens=usage.prompt_tokens if self.generation else 0,
                output_tokens=usage.completion_tokens,
            )

    def finish_reason(self, sequence: EngineSequence) -> str:
        """The finish reason that the client received. It has one only if all sequences finished."""
        if sequence.finish_reason is not None and self.status == 200:
            return sequence.finish_reason
        return "client_disconnected" if self.status == 499 else "error"


@dataclass(slots=True, eq=False, kw_only=True)
class RequestContext(ServedRequest):
    handler: EndpointHandler
    response_headers: list[tuple[bytes, bytes]]  # more of them, until the response starts
    routing_hints: list[RoutingHints] = field(default_factory=list)  # one for each prompt
    choices: Sequence[ChoiceOutput] = ()

    @property
    def request(self) -> GenerationRequest:
        return self.handler.request

    @property
    def operation(self) -> str:
        return self.handler.operation

    @property
    def requested_model(self) -> str | None:
        return self.request.model

    @property
    def rank(self) -> int:
        return self.request.priority or 0

    @property
    def num_prompts(self) -> int:
        return self.handler.num_prompts

    @property
    def num_choices(self) -> int:
        return self.request.n or 1

    @property
    def num_reasoning_tokens(self) -> int | None:
        counts = [count for choice in self.choices if (count := choice.num_reasoning_tokens) is not None]
        return sum(counts) if counts else None

    def finish_reason(self, sequence: EngineSequence) -> str:
        """The finish reason that the client received. A response that is not streamed has one only if all of its
        sequences finished."""
        if sequence.finish_reason is not None and self.request.stream:
            return sequence.finish_reason
        return ServedRequest.finish_reason(self, sequence)
