"""Responses requests as the conversations that all APIs of chats share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from proa.contract import SamplingParams, TokenLogprobs
from proa_gateway.apis.responses.items import (
    CallItem,
    CallOutputItem,
    Fields,
    Item,
    MessageItem,
    ReasoningItem,
    content_of,
)
from proa_gateway.apis.responses.output import LogprobsOf, OutputItems
from proa_gateway.apis.responses.protocol import REFUSED, ResponsesRequest
from proa_gateway.apis.responses.render import Keep, ResponsesAnswer, ResponsesChoice, new_response
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.serving.content import Part
from proa_gateway.serving.conversation import ChatMessage, Conversation
from proa_gateway.serving.conversation_handler import ConversationHandler, ConversationSettings
from proa_gateway.serving.envelope import Prompt
from proa_gateway.serving.refused_fields import Refused
from proa_gateway.serving.tools import MAX_CALLS


def conversation_of(body: ResponsesRequest, history: Sequence[Item]) -> Conversation:
    """`history`: the input of previous responses, and their outputs."""
    items = [*history, *body.input]
    continues = _is_unfinished(items[-1])
    system = [_message("system", body.instructions)] if body.instructions else []
    functions = body.functions
    return Conversation(
        messages=[*system, *chat_messages(items, len(history))],
        tools=body.tool_choice.tools(functions),
        tool_choice=body.tool_choice.choice(functions),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        includes_reasoning=body.include_reasoning is not False,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        template_kwargs=body.chat_template_kwargs or {},
        opens_message=not continues,
        continues_message=continues,
    )


def chat_messages(items: Iterable[Item], num_before: int = 0) -> Iterator[ChatMessage]:
    """Reasoning, text and calls of one answer, which are items of their own, become one message. `num_before`: how many
    of the items come before those of the body."""
    answer = _Answer()
    for index, item in enumerate(items, start=-num_before):
        path = f"input[{index}]" if index >= 0 else ""
        if isinstance(item, CallOutputItem):
            yield from answer.take()
            yield _message("tool", content_of(item.output, path and f"{path}.output"), tool_call_id=item.call_id)
        elif isinstance(item, MessageItem) and item.role != "assistant":
            yield from answer.take()
            yield _message(item.role, content_of(item.content, path and f"{path}.content"))
        else:
            if answer.is_before(item):
                yield from answer.take()
            answer.add(item, path)
    yield from answer.take()


class _Answer:
    """An assistant's message that is being put together."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}

    def is_before(self, item: Item) -> bool:
        """Whether the item begins another message: reasoning comes first, then text, then calls."""
        if len(self._fields.get("tool_calls", ())) >= MAX_CALLS:
            return True
        return not isinstance(item, CallItem) and not self._fields.keys().isdisjoint({"content", "tool_calls"})

    def add(self, item: Item, path: str) -> None:
        if isinstance(item, ReasoningItem):
            earlier = self._fields.get("reasoning_content")
            self._fields["reasoning_content"] = f"{earlier}\n{item.text}" if earlier else item.text
        elif isinstance(item, MessageItem):
            self._fields["content"] = content_of(item.content, path and f"{path}.content")
        elif isinstance(item, CallItem):
            function = {"name": item.call_name.flat, "arguments": item.arguments}
            self._fields.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})

    def take(self) -> list[ChatMessage]:
        fields, self._fields = self._fields, {}
        return [ChatMessage.model_validate({"role": "assistant", **fields})] if fields else []


def _is_unfinished(item: Item) -> bool:
    """As in vLLM, a client may have a message continued."""
    return isinstance(item, MessageItem) and item.role == "assistant" and item.status in ("in_progress", "incomplete")


def _message(role: str, content: str | list[Part], **fields: object) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": content, **fields})


class ResponsesHandler(ConversationHandler):
    """The `EndpointHandler` of `/v1/responses`."""

    route: ClassVar[str] = "/v1/responses"
    operation: ClassVar[str] = "chat"
    id_prefix: ClassVar[str] = "resp_"
    prompt_param: ClassVar[str] = "input"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED

    def __init__(
        self,
        body: ResponsesRequest,
        history: Sequence[Item],
        settings: ConversationSettings,
        keep: Keep,
        on_ignored: Callable[[Sequence[str]], None],
    ) -> None:
        """`history`: the items before those of the body. `keep` gets the response when it has ended, and one in the
        background also when it has started."""
        super().__init__(
            body.generation_request(),
            conversation_of(body, history),
            settings,
            max_tokens=body.max_output_tokens,
            logprobs=body.top_logprobs or 0 if body.wants_logprobs else None,
            on_ignored=on_ignored,
        )
        self._body = body
        self.keep = keep
        self._params = SamplingParams()

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        return self._body.extra_fields

    @property
    def session_id(self) -> str | None:
        return self._body.session_id or self._body.prompt_cache_key or self._body.user

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        params = super().sampling_params(model)
        self._params = params[0]
        return params

    async def tokenize(self, model: ServedModel, *, limit: int | None = None) -> list[Prompt]:
        effort = self.conversation.reasoning_effort
        thinking = None if effort is None else effort != "none"
        self._fit_reasoning(model, thinking, thinking_field="reasoning.effort", effort_field="reasoning.effort")
        return await super().tokenize(model, limit=limit)

    def answer(self, id: str, created: int, model: ServedModel, prompts: Sequence[Prompt]) -> ResponsesAnswer:
        response = new_response(self._body, id=id, created=created, model=model.name, params=self._params)
        if self._body.background:
            self.keep(response)
        wants_logprobs = self._body.wants_logprobs
        items = OutputItems(
            includes_reasoning=self.conversation.includes_reasoning,
            logprobs=self._logprobs_of(model) if wants_logprobs else None,
            call_names=[function.call_name for function in self._body.functions],
        )
        message_format = self.message_format(model, prompts[0])
        return ResponsesAnswer(ResponsesChoice(response, items), message_format, self.keep, wants_tokens=wants_logprobs)

    def _logprobs_of(self, model: ServedModel) -> LogprobsOf:
        chat_logprobs = self._request.chat_logprobs(model.tokenizer.vocabulary)

        def render(entries: Sequence[TokenLogprobs]) -> list[Fields]:
            content: list[Fields] = chat_logprobs(entries)["content"]
            return content

        return render
