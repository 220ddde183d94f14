"""Chat completions: the prompt is a conversation, and choices are messages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.apis.chat.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from proa_gateway.apis.chat.render import BatchChatAnswer, ChatAnswer
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.conversation import Conversation
from proa_gateway.serving.conversation_handler import ConversationHandler, ConversationSettings
from proa_gateway.serving.envelope import Envelope, Prompt
from proa_gateway.serving.message_constraint import MessageConstraint
from proa_gateway.serving.refused_fields import REFUSED_IN_CHAT, Refused
from proa_gateway.serving.tools import choose_tools


class ChatHandler(ConversationHandler):
    """The `EndpointHandler` of `/v1/chat/completions`."""

    route: ClassVar[str] = "/v1/chat/completions"
    operation: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "chatcmpl-"
    prompt_param: ClassVar[str] = "messages"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_CHAT

    def __init__(
        self,
        request: ChatCompletionRequest,
        settings: ConversationSettings,
        *,
        on_ignored: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        super().__init__(
            request,
            conversation_of(request),
            settings,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=request.top_logprobs or 0 if request.logprobs else None,
            on_ignored=on_ignored,
        )
        self._chat = request

    @property
    def session_id(self) -> str | None:
        return self._chat.session_id or self._chat.prompt_cache_key or self._chat.user

    def validate(self) -> None:
        super().validate()
        if self._chat.top_logprobs and not self._chat.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")

    def answer(self, id: str, created: int, model: ServedModel, prompts: Sequence[Prompt]) -> ChatAnswer:
        request = self._chat
        name = "chat.completion.chunk" if request.stream else "chat.completion"
        envelope = Envelope(id=id, object=name, created=created, model=model.name, include_usage=request.include_usage)
        message_format = self.message_format(model, prompts[0])
        return ChatAnswer(request, envelope, model.tokenizer.vocabulary, prompts[0], message_format)


def conversation_of(request: ChatCompletionRequest) -> Conversation:
    budget = request.thinking_token_budget
    tools, tool_choice = choose_tools(request.tools or (), request.tool_choice or "auto")
    return Conversation(
        messages=request.messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        includes_reasoning=request.include_reasoning is not False,
        separates_reasoning=request.separate_reasoning is not False,
        thinking_token_budget=None if budget == -1 else budget,
        reasoning_effort=request.reasoning_effort,
        documents=request.documents or (),
        template_kwargs=request.chat_template_kwargs or {},
        chat_template=request.chat_template,
        opens_message=request.opens_message,
        continues_message=bool(request.continue_final_message),
    )


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
