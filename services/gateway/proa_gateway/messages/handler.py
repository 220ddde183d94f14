"""MessagesHandler: a request to `/v1/messages`, and the number of tokens that one would have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.messages.answer import MessagesAnswer
from proa_gateway.messages.choice import MessagesChoice
from proa_gateway.messages.convert import conversation_of, generation_request
from proa_gateway.messages.protocol import REFUSED, CountTokensRequest, MessagesRequest
from proa_gateway.openai.conversation_handler import ConversationHandler, ConversationSettings
from proa_gateway.openai.envelope import Prompt
from proa_gateway.openai.protocol import GenerationRequest
from proa_gateway.openai.refused_fields import Refused

OnIgnored = Callable[[Sequence[str]], None]


class _Handler(ConversationHandler):
    prompt_param: ClassVar[str] = "messages"

    def __init__(
        self,
        body: CountTokensRequest,
        request: GenerationRequest,
        settings: ConversationSettings,
        on_ignored: OnIgnored | None,
    ) -> None:
        super().__init__(request, conversation_of(body), settings, max_tokens=request.max_tokens, on_ignored=on_ignored)
        self._body = body

    async def tokenize(self, model: ServedModel, *, limit: int | None = None) -> list[Prompt]:
        thinking = None if self._body.thinking is None else self._body.thinking.is_on
        self._fit_reasoning(model, thinking, thinking_field="thinking", effort_field="output_config.effort")
        return await super().tokenize(model, limit=limit)


class MessagesHandler(_Handler):
    """The `EndpointHandler` of `/v1/messages`."""

    route: ClassVar[str] = "/v1/messages"
    operation: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "msg_"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED

    def __init__(
        self, body: MessagesRequest, settings: ConversationSettings, request_id: str, on_ignored: OnIgnored
    ) -> None:
        super().__init__(body, generation_request(body), settings, on_ignored)
        self._metadata = body.metadata
        self._request_id = request_id

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        return self._body.extra_fields

    @property
    def session_id(self) -> str | None:
        return self._metadata.user_id if self._metadata else None

    def answer(self, id: str, created: int, model: ServedModel, prompts: Sequence[Prompt]) -> MessagesAnswer:
        head = {"id": id, "type": "message", "role": "assistant", "model": model.name}
        choice = MessagesChoice(head, includes_reasoning=self.conversation.includes_reasoning)
        return MessagesAnswer(choice, self.message_format(model, prompts[0]), self._request_id)


async def count_tokens(body: CountTokensRequest, settings: ConversationSettings, model: ServedModel) -> int:
    """The tokens of the prompt. Raises `InvalidRequest`."""
    return await _Handler(body, GenerationRequest.model_validate({}), settings, None).count_tokens(model)
