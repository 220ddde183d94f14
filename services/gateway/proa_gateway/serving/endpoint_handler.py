"""EndpointHandler: what differs between generation endpoints."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.serving.answer import Answer
from proa_gateway.serving.envelope import Prompt
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.message_constraint import MessageConstraint
from proa_gateway.serving.refused_fields import Refused


class EndpointHandler(Protocol):
    """One request to one endpoint. The methods are in the order of their calls.

    Those of chats derive from `ConversationHandler`, which has all but the class variables, `session_id` and `answer`.
    """

    route: ClassVar[str]
    operation: ClassVar[str]  # `gen_ai.operation.name` in OpenTelemetry's semantic conventions
    id_prefix: ClassVar[str]  # of the response's id
    prompt_param: ClassVar[str]  # request field that errors about the prompt name
    refused: ClassVar[Mapping[str, Refused]]  # the fields that the request's class does not have

    @property
    def request(self) -> GenerationRequest:
        """The fields that all endpoints have, by OpenAI's names whatever the API calls them."""
        ...

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        """The fields of the body that its class does not have, by their path in it."""
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

    def message_constraint(self, model: ServedModel, prompts: Sequence[Prompt]) -> MessageConstraint | None:
        """What the form of a message demands of the output. None: all output is content."""
        ...

    def answer(self, id: str, created: int, model: ServedModel, prompts: Sequence[Prompt]) -> Answer:
        """How the response looks. `created`: Unix seconds."""
        ...

    def text_stream(self, prompt: Prompt, model: ServedModel) -> TextStream | None:
        """Turns the output's tokens into text. None: the output is discarded, only the prompt is scored."""
        ...
