"""The messages of a conversation as chat templates expect them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from proa.template_content import ContentForms
from proa_gateway.openai.content import as_read
from proa_gateway.openai.protocol import ChatMessage, ToolCall

# Names of an assistant's reasoning. Clients send one of them; templates read one of them.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class Arguments(dict[str, Any]):
    """A call's arguments. Some templates read a mapping, others write a string: this one adds and prints as JSON."""

    def __init__(self, arguments: Mapping[str, Any], text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return f"{self}{other}"

    def __radd__(self, other: object) -> str:
        return f"{other}{self}"


def template_messages(
    messages: Sequence[ChatMessage],
    forms: Mapping[str, ContentForms],
    *,
    placeholder: str = "",
    keeps_null: bool = False,
) -> list[dict[str, Any]]:
    """A result of a call gets the call's name. Reasoning has all of its names.

    `forms`: of contents that the template reads, by role; other roles are as the user's. `placeholder`: of images.
    `keeps_null`: messages of calls alone have a content, which is None; else they have none, as in transformers.
    """
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    return [_template_message(message, names, forms, placeholder, keeps_null) for message in messages]


def call_arguments(arguments: str | Mapping[str, Any] | None) -> Arguments | str:
    """A text that is no JSON object stays as it is."""
    if isinstance(arguments, Arguments):
        return arguments
    if not arguments:
        return Arguments({}, "{}")
    if isinstance(arguments, Mapping):
        return Arguments(arguments, json.dumps(arguments, ensure_ascii=False))
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # raises for a lone surrogate, which no prompt can have
    except (ValueError, RecursionError):
        return arguments
    return Arguments(value, arguments) if isinstance(value, dict) else arguments


def _template_message(
    message: ChatMessage,
    names: Mapping[str, str],
    forms: Mapping[str, ContentForms],
    placeholder: str,
    keeps_null: bool,
) -> dict[str, Any]:
    fields: dict[str, Any] = dict(message.model_extra or {})
    role = "system" if message.role == "developer" else message.role  # OpenAI's newer name of `system`
    content = as_read(message.content, forms.get(role, forms["user"]), placeholder)
    fields |= {"role": role, "content": content}
    name = message.name or names.get(message.tool_call_id or "")
    if name is not None:
        fields["name"] = name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
        if message.content is None:
            fields.pop("content")
            fields |= {"content": None} if keeps_null else {}
    reasoning = next((fields[name] for name in REASONING_FIELDS if fields.get(name)), None)
    return fields if reasoning is None else fields | dict.fromkeys(REASONING_FIELDS, reasoning)


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call_arguments(call.function.arguments)}
    return {**(call.model_extra or {}), "id": call.id, "type": "function", "function": function}
