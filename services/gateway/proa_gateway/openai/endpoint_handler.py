"""EndpointHandler: what differs between generation endpoints."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.openai.envelope import Envelope, Prompt
from proa_gateway.openai.protocol import GenerationRequest
from proa_gateway.openai.refused_fields import Refused
from proa_gateway.openai.rendering import Choice
from proa_gateway.output_processor import Delta


class EndpointHandler(Protocol):
    """One request to one endpoint. The methods are in the order of their calls."""

    route: ClassVar[str]
    operation: ClassVar[str]  # `gen_ai.operation.name` in OpenTelemetry's semantic conventions
    id_prefix: ClassVar[str]  # of the response's id
    prompt_param: ClassVar[str]  # request field that errors about the prompt name
    refused: ClassVar[Mapping[str, Refused]]  # the fields that the request's class does not have

    @property
    def request(self) -> GenerationRequest:
        """The fields that all endpoints have."""
        ...

    @property
    def num_prompts(self) -> int: ...

    @property
    def session_id(self) -> str | None:
        """What the requests of one conversation have in common, for session affinity."""
        ...

    def validate(self) -> None:
        """Check fields that depend on each other and need no model. Raises `InvalidRequest`."""

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        """One for each choice of a prompt. Raises `InvalidRequest`."""
        ...

    async def tokenize(self, model: ServedModel) -> list[Prompt]:
        """The prompts. Raises `InvalidRequest`."""
        ...

    def envelope(self, id: str, created: int, model: str) -> Envelope:
        """The fields around the choices. `created`: Unix seconds."""
        ...

    def choice(self, envelope: Envelope, index: int, prompt: Prompt, model: ServedModel) -> Choice:
        """The JSON of choice `index`, counted over all prompts."""
        ...

    def text_stream(self, prompt: Prompt, model: ServedModel) -> TextStream | None:
        """Turns the output's tokens into text. None: the output is discarded, only the prompt is scored."""
        ...

    @property
    def wants_tokens(self) -> bool:
        """Whether the response has token ids or log probabilities."""
        ...

    def response_fields(
        self, prompts: Sequence[Prompt], results: Sequence[Delta], model: ServedModel
    ) -> dict[str, Any]:
        """More top-level fields of a response that is not streamed. `results`: one for each choice."""
        ...
