"""Batches of chats, as in vLLM: one request with several conversations, and a response with a choice for each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import GatewayError, InvalidRequest
from proa_gateway.openai.answer import CollectedChoice, EventOutlet, StreamedChoice
from proa_gateway.openai.chat_answer import ChatAnswer
from proa_gateway.openai.conversation_handler import ConversationSettings
from proa_gateway.openai.envelope import Envelope, Prompt, Usage
from proa_gateway.openai.message_constraint import MessageConstraint
from proa_gateway.openai.protocol import ChatCompletionRequest, ChatFields, Messages
from proa_gateway.openai.refused_fields import REFUSED_IN_CHAT, Refused
from proa_gateway.openai.serving_chat import ChatHandler

MAX_CHATS = 1024  # a gateway has a lower limit of choices in one request


class BatchChatCompletionRequest(ChatFields):
    """`POST /v1/chat/completions/batch`. The fields are those of a chat completion, for each of the conversations."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_CHATS, fail_fast=True)]

    @property
    def chats(self) -> list[ChatCompletionRequest]:
        """A request for each conversation. Fields that the class does not have are not in them."""
        fields = {name: getattr(self, name) for name in self.model_fields_set if name in ChatFields.model_fields}
        return [ChatCompletionRequest.model_construct(**fields, messages=messages) for messages in self.messages]


class BatchChatHandler:
    """The `EndpointHandler` of a batch: those of its chats, as prompts of one request."""

    route: ClassVar[str] = "/v1/chat/completions/batch"
    operation: ClassVar[str] = ChatHandler.operation
    id_prefix: ClassVar[str] = ChatHandler.id_prefix
    prompt_param: ClassVar[str] = ChatHandler.prompt_param
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_CHAT

    def __init__(
        self,
        request: BatchChatCompletionRequest,
        settings: ConversationSettings,
        *,
        on_ignored: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        chats = request.chats
        first = ChatHandler(chats[0], settings, on_ignored=on_ignored)  # fields are ignored in all, or in none
        self._chats = [first, *(ChatHandler(chat, settings) for chat in chats[1:])]
        for index, chat in enumerate(self._chats):
            chat.messages_param = f"messages[{index}]"
        self.request = request
        self.num_prompts = len(chats)

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        return self.request.extra_fields

    @property
    def session_id(self) -> str | None:
        return self._chats[0].session_id

    def validate(self) -> None:
        if (self.request.n or 1) > 1:
            raise InvalidRequest("n must be 1 in a batch: each conversation has one choice.", param="n")
        if self.request.stream:
            raise InvalidRequest("A batch cannot be streamed.", param="stream")
        for chat in self._chats:
            chat.validate()

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        return self._chats[0].sampling_params(model)

    async def tokenize(self, model: ServedModel) -> list[Prompt]:
        return [prompt for chat in self._chats for prompt in await chat.tokenize(model)]

    def message_constraint(self, model: ServedModel, prompts: Sequence[Prompt]) -> MessageConstraint | None:
        first, *others = (
            chat.message_constraint(model, [prompt]) for chat, prompt in zip(self._chats, prompts, strict=True)
        )
        if any(other != first for other in others):
            message = "Some conversations of the batch end within reasoning, others do not: send them apart."
            raise InvalidRequest(message, param="messages")
        return first

    def answer(self, id: str, created: int, model: ServedModel, prompts: Sequence[Prompt]) -> "BatchChatAnswer":
        envelope = Envelope(id=id, object="chat.completion", created=created, model=model.name)
        answers = [chat.answer(id, created, model, [prompt]) for chat, prompt in zip(self._chats, prompts, strict=True)]
        return BatchChatAnswer(envelope, answers)

    def text_stream(self, prompt: Prompt, model: ServedModel) -> TextStream | None:
        return self._chats[0].text_stream(prompt, model)


class BatchChatAnswer:
    """The `Answer` of a batch that is not streamed. `answers`: of its chats."""

    def __init__(self, envelope: Envelope, answers: Sequence[ChatAnswer]) -> None:
        self._envelope = envelope
        self._answers = answers

    @property
    def wants_tokens(self) -> bool:
        return self._answers[0].wants_tokens

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> StreamedChoice:
        return self._answers[index].stream(index, prompt, outlet)

    def collect(self, index: int, prompt: Prompt) -> CollectedChoice:
        return self._answers[index].collect(index, prompt)

    def last_events(self, usage: Usage) -> bytes:
        return self._envelope.last_events(usage)

    def error_events(self, error: GatewayError) -> bytes:
        return self._envelope.error_events(error)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        return self._envelope.response([choice.final() for choice in choices], usage)
