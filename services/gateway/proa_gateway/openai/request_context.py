"""One generation request's state from arrival to the end, and what differs between the two routes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from proa_gateway.admission.auth import Caller
from proa_gateway.engines.generation import Generation
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import GatewayError
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import RequestTrace
from proa_gateway.openai.protocol import ChatCompletionRequest, CompletionRequest
from proa_gateway.openai.rendering import Choice, Envelope, Prompt, Usage
from proa_gateway.output_processor import Delta, OutputProcessor
from proa_gateway.routing.hints import RoutingHints


class EndpointHandler(Protocol):
    """One request of one route: its prompts, and how its choices look."""

    operation: ClassVar[str]  # as in the GenAI semantic conventions
    route: ClassVar[str]
    prompt_param: ClassVar[str]  # the field that holds the prompt
    object: ClassVar[str]
    stream_object: ClassVar[str]
    id_prefix: ClassVar[str]

    @property
    def request(self) -> ChatCompletionRequest | CompletionRequest: ...

    @property
    def num_prompts(self) -> int: ...

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """Raises `InvalidRequest`."""
        ...

    def context(self, prompt: Prompt) -> Sequence[int]:
        """The tokens that an output's text goes on from."""
        ...

    def wants_tokens(self) -> bool:
        """Whether tokens or log probabilities are part of the answer."""
        ...

    def choice(self, envelope: Envelope, index: int, prompt: Prompt, model: ServedModel) -> Choice: ...

    def extras(
        self, choices: list[dict[str, Any]], prompts: Sequence[Prompt], results: Sequence[Delta], model: ServedModel
    ) -> dict[str, Any]:
        """Fields beside the choices; may also add some to the choices, which stand for the results."""
        ...


@dataclass(slots=True, eq=False)
class RequestContext:
    """`status` and `error` are what became of it; 499 stands for a client that went away."""

    handler: EndpointHandler
    caller: Caller
    trace: RequestTrace
    id: str
    arrived: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)  # Unix seconds
    time_limit: float = 0.0  # seconds from `arrived` to the last token
    model: ServedModel | None = None
    session_id: str | None = None  # whatever the client calls its conversation
    prompts: list[Prompt] = field(default_factory=list)
    routing_hints: list[RoutingHints] = field(default_factory=list)  # one for each prompt
    generation: Generation | None = None
    error: GatewayError | None = None
    status: int = 200

    @property
    def request(self) -> ChatCompletionRequest | CompletionRequest:
        return self.handler.request

    @property
    def seconds_left(self) -> float:
        return self.arrived + self.time_limit - time.perf_counter()

    @property
    def priority(self) -> int:
        """In the engine. Where keys are asked for, it is not the client's to say who goes before others' requests."""
        return self.caller.priority if self.caller.name else self.request.priority or 0

    @property
    def usage(self) -> Usage:
        """So far. Prompts count once, whatever `n` is."""
        sequences = self.generation.sequences if self.generation else []
        firsts = sequences[:: max(1, len(sequences) // max(1, len(self.prompts)))]
        return Usage(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            completion_tokens=sum(sequence.num_tokens for sequence in sequences),
            cached_tokens=sum(sequence.num_cached_tokens for sequence in firsts),
        )

    def envelope(self) -> Envelope:
        assert self.model is not None
        handler = self.handler
        options = handler.request.stream_options
        return Envelope(
            id=self.id,
            object=handler.stream_object if handler.request.stream else handler.object,
            created=int(self.created),
            model=self.model.name,
            include_usage=bool(options and options.include_usage),
        )

    def report(self, metrics: GatewayMetrics) -> None:
        """Ends the trace and observes the metrics; call it once, at the end."""
        usage = self.usage
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
            finish_reasons=self._finish_reasons(),
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
            error_type=self.error_type,
        )
        for sequence in self.generation.sequences if self.generation else ():
            metrics.observe_finish(model, self._reason(sequence))

    def _reason(self, sequence: OutputProcessor) -> str:
        """What the client was told of a sequence's end. Without a stream an error is told instead of all of them."""
        told = self.status == 200 or self.request.stream
        if told and sequence.finish_reason is not None:
            return sequence.finish_reason
        return "client_disconnected" if self.status == 499 else "error"

    @property
    def error_type(self) -> str:
        """Empty: there was none."""
        if self.error is not None:
            return self.error.code or type(self.error).__name__
        return {200: "", 499: "client_disconnected"}.get(self.status, "internal_error")

    def _finish_reasons(self) -> list[str]:
        sequences = self.generation.sequences if self.generation else []
        return [sequence.finish_reason for sequence in sequences if sequence.finish_reason is not None]
