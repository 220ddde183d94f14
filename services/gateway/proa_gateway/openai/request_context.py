"""RequestContext: the state of one generation request."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proa_gateway.engine_sequence import EngineSequence
from proa_gateway.openai.answer import ChoiceOutput
from proa_gateway.openai.endpoint_handler import EndpointHandler
from proa_gateway.openai.protocol import GenerationRequest
from proa_gateway.openai.served_request import ServedRequest
from proa_gateway.routing.hints import RoutingHints


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
