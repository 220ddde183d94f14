"""Responses: their requests as the conversations that all APIs of chats share."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from proa.contract import TokenLogprobs
from proa_gateway.apis.responses.items import (
    AdditionalToolsItem,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Fields,
    Item,
    MessageItem,
    ReasoningItem,
    RecordItem,
    content_of,
)
from proa_gateway.apis.responses.output import LogprobsOf, OutputItems
from proa_gateway.apis.responses.protocol import REFUSED, ResponsesRequest
from proa_gateway.apis.responses.render import Keep, ResponsesRenderer, new_response
from proa_gateway.apis.responses.tools import Function
from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.content import Part, together
from proa_gateway.serving.conversation import MAX_CALLS, ChatMessage, Conversation, ReasoningFields
from proa_gateway.serving.conversation_call import ConversationCall, ConversationReader, PreparedChat
from proa_gateway.serving.job import ApiSettings, Endpoint
from proa_gateway.serving.tools.tool import CustomTool

RESPONSES = Endpoint("/v1/responses", "chat", "resp_", REFUSED)


def responses_call(
    body: ResponsesRequest, history: Sequence[Item], settings: ApiSettings, keep: Keep
) -> ConversationCall:
    """`history`: the items before those of the body. `keep` gets the response when it has ended, and one in the
    background also when it has started. Raises `InvalidRequest`."""
    request, functions = body.generation_request(), body.functions(history)
    return ConversationCall(
        endpoint=RESPONSES,
        fields=request,
        session_id=body.session_id or body.prompt_cache_key or body.user,
        extra_fields=body.extra_fields,
        warnings=body.warnings,
        settings=settings,
        reader=ConversationReader(
            conversation=conversation_of(body, history, functions),
            request=request,
            settings=settings,
            param="input",
            max_tokens=body.max_output_tokens,
            reasoning_fields=_reasoning_fields(body),
        ),
        renderer=lambda chat: partial(_renderer, body, functions, chat, settings, keep),
        param="input",
        logprobs=body.top_logprobs or 0 if body.wants_logprobs else None,
    )


def _reasoning_fields(body: ResponsesRequest) -> ReasoningFields:
    effort = body.reasoning.effort if body.reasoning else None
    return ReasoningFields("reasoning.effort", None if effort is None else effort != "none", "reasoning.effort")


def _renderer(
    body: ResponsesRequest,
    functions: Sequence[Function],
    chat: PreparedChat,
    settings: ApiSettings,
    keep: Keep,
    id: str,
    created: int,
) -> ResponsesRenderer:
    response = new_response(body, id=id, created=created, model=chat.model.name, params=chat.params)
    if body.background:
        keep(response)
    items = OutputItems(
        includes_reasoning=body.include_reasoning is not False,
        logprobs=_logprobs_of(body, chat, settings) if body.wants_logprobs else None,
        call_names=[function.call_name for function in functions],
        custom_tools={each.call_name.flat for each in functions if isinstance(each.tool, CustomTool)},
    )
    return ResponsesRenderer(response, items, keep, is_streamed=bool(body.stream), wants_tokens=body.wants_logprobs)


def _logprobs_of(body: ResponsesRequest, chat: PreparedChat, settings: ApiSettings) -> LogprobsOf:
    chat_logprobs = body.chat_logprobs(chat.model.tokenizer.vocabulary, as_ids=settings.tokens_as_ids)

    def render(entries: Sequence[TokenLogprobs]) -> list[Fields]:
        content: list[Fields] = chat_logprobs(entries)["content"]
        return content

    return render


def conversation_of(body: ResponsesRequest, history: Sequence[Item], functions: Sequence[Function]) -> Conversation:
    """`history`: the input of previous responses, and their outputs. `functions`: all of the request's."""
    items = [*history, *body.input]
    continues = _is_unfinished(items[-1])
    system = [_message("system", body.instructions)] if body.instructions else []
    messages = [*system, *chat_messages(items, len(history))]
    if not messages:
        raise InvalidRequest("input: there is nothing in it that the model could read.", param="input")
    return Conversation(
        messages=messages,
        tools=body.tool_choice.tools(functions),
        left_out_tools=[*body.offered_tools, *body.tool_choice.left_out],
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
        if isinstance(item, AdditionalToolsItem) or (isinstance(item, RecordItem) and not item.text):
            continue
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
        self._fields: dict[str, Any] = {}  # of the `ChatMessage`
        self._has_message = False  # whose text is in the content, maybe after records

    def is_before(self, item: Item) -> bool:
        """Whether the item begins another message: reasoning comes first, then text and records, then calls."""
        if isinstance(item, CallItem | CustomCallItem):
            return len(self._fields.get("tool_calls", ())) >= MAX_CALLS
        if isinstance(item, ReasoningItem):
            return not self._fields.keys().isdisjoint({"content", "tool_calls"})
        return "tool_calls" in self._fields or (self._has_message and isinstance(item, MessageItem))

    def add(self, item: Item, path: str) -> None:
        if isinstance(item, ReasoningItem):
            earlier = self._fields.get("reasoning_content")
            self._fields["reasoning_content"] = f"{earlier}\n{item.text}" if earlier else item.text
        elif isinstance(item, MessageItem):
            self._add_content(content_of(item.content, path and f"{path}.content"))
            self._has_message = True
        elif isinstance(item, RecordItem):
            self._add_content(item.text)
        elif isinstance(item, CallItem | CustomCallItem):
            function = {"name": item.call_name.flat, "arguments": item.arguments}
            self._fields.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})

    def _add_content(self, content: str | list[Part]) -> None:
        earlier = self._fields.get("content")
        self._fields["content"] = content if earlier is None else together(earlier, content)

    def take(self) -> list[ChatMessage]:
        fields, self._fields, self._has_message = self._fields, {}, False
        return [ChatMessage.model_validate({"role": "assistant", **fields})] if fields else []


def _is_unfinished(item: Item) -> bool:
    """Whether the answer continues this item, as in vLLM: an assistant's message that is not completed."""
    return isinstance(item, MessageItem) and item.role == "assistant" and item.status in ("in_progress", "incomplete")


def _message(role: str, content: str | list[Part], **fields: object) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": content, **fields})
