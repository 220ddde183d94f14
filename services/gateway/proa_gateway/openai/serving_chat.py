"""Chat completions: the prompt is a conversation, and choices are messages."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.openai.chat_answer import ChatAnswer
from proa_gateway.openai.conversation import Conversation
from proa_gateway.openai.conversation_handler import ConversationHandler, ConversationSettings
from proa_gateway.openai.envelope import Envelope, Prompt
from proa_gateway.openai.protocol import ChatCompletionRequest
from proa_gateway.openai.refused_fields import REFUSED_IN_CHAT, Refused
from proa_gateway.openai.tools import choose_tools


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
