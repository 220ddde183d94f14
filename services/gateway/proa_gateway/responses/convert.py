"""Responses requests as the conversations that all APIs of chats share."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from proa_gateway.openai.content_parts import Part
from proa_gateway.openai.conversation import Conversation
from proa_gateway.openai.protocol import ChatMessage
from proa_gateway.openai.tools import MAX_CALLS
from proa_gateway.responses.items import CallItem, CallOutputItem, Item, MessageItem, ReasoningItem
from proa_gateway.responses.parts import content_of
from proa_gateway.responses.protocol import ResponsesRequest


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
