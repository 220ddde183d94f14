"""The chat template's input and output: a conversation's messages and variables to the prompt's text."""

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from proa.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateTooCostly, cut_at_mark, marked
from proa.template_rules import (
    REASONING_FIELDS,
    THINKING_SWITCHES,
    Message,
    messages_as_read,
    nearest_effort,
    text_of,
)
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.serving.content import ContentFormat, for_template, forms_of
from proa_gateway.serving.conversation import ChatMessage, Conversation, ReasoningFields, ToolCall
from proa_gateway.serving.fields import Effort
from proa_gateway.tokenizer import TemplateRenderer


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


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """The messages as objects, for `fit_messages` and `messages_as_read`. A result of a call gets the call's name.
    Reasoning has all of its names."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    return [_template_message(message, names) for message in messages]


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


def _template_message(message: ChatMessage, names: Mapping[str, str]) -> Message:
    fields: dict[str, Any] = dict(message.model_extra or {})
    content = message.content
    fields |= {"role": message.role, "content": for_template(content) if isinstance(content, list) else content}
    name = message.name or names.get(message.tool_call_id or "")
    if name is not None:
        fields["name"] = name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    reasoning = next((fields[name] for name in REASONING_FIELDS if fields.get(name)), None)
    return fields if reasoning is None else fields | dict.fromkeys(REASONING_FIELDS, reasoning)


def _template_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call_arguments(call.function.arguments)}
    return {**(call.model_extra or {}), "id": call.id, "type": "function", "function": function}


async def render_prompt(
    conversation: Conversation,
    messages: Sequence[Message],
    template: ChatTemplate,
    renderer: TemplateRenderer,
    content_format: ContentFormat = "auto",
    *,
    placeholder: str = "",
) -> str:
    """`messages`: those of the conversation, as objects that fit the template. `placeholder`: what stands for an image.
    Raises `InvalidRequest` if the template refuses the messages or does not use a field that is set, and
    `ChatTemplateTooCostly`."""
    opens_message = conversation.opens_message
    text = await _render(
        conversation, messages, template, renderer, content_format, placeholder, opens_message=opens_message
    )
    return _cut(text) if conversation.continues_message else text


async def generation_prompt(
    conversation: Conversation,
    messages: Sequence[Message],
    template: ChatTemplate,
    renderer: TemplateRenderer,
    prompt: str,
    content_format: ContentFormat = "auto",
    *,
    placeholder: str = "",
) -> str:
    """The end of the prompt that begins the answer: what the template adds for it, or the message to be continued."""
    if conversation.continues_message:
        return text_of(messages[-1].get("content"))
    if not conversation.opens_message:
        return ""
    history = await _render(
        conversation, messages, template, renderer, content_format, placeholder, opens_message=False
    )
    return prompt[num_common(prompt, history) :]


def num_common(one: str, other: str) -> int:
    """The characters with which both texts begin."""
    if one.startswith(other):
        return len(other)
    return bisect(range(len(one)), False, key=lambda length: not other.startswith(one[: length + 1]))


async def _render(
    conversation: Conversation,
    messages: Sequence[Message],
    template: ChatTemplate,
    renderer: TemplateRenderer,
    content_format: ContentFormat,
    placeholder: str,
    *,
    opens_message: bool,
) -> str:
    forms = forms_of(template, content_format)
    read = messages_as_read(messages, forms, placeholder=placeholder, keeps_null=template.tests_none)
    if conversation.continues_message:
        read[-1]["content"] = marked(read[-1].get("content") or "")
    variables = {**conversation.template_kwargs, **_variables(conversation, template)}
    try:
        return await renderer.render(template, read, variables, add_generation_prompt=opens_message)
    except ChatTemplateTooCostly:
        raise
    except ChatTemplateError as error:
        raise InvalidRequest(f"The model's chat template refuses the messages: {error}", param="messages") from error


@dataclass(frozen=True, slots=True)
class FittedReasoning:
    """A conversation with what the template uses of its reasoning fields."""

    conversation: Conversation
    unused_fields: Sequence[str]  # their paths
    warnings: Sequence[str]  # about an effort that was replaced


def fit_reasoning(conversation: Conversation, template: ChatTemplate, fields: ReasoningFields) -> FittedReasoning:
    """Choose the accepted effort that is nearest. `none` also switches reasoning off, if the template has a switch;
    then it need not be an effort that it accepts. The request's own variables of the template stay."""
    sent, efforts, warnings = conversation.reasoning_effort, template.rules.efforts, []
    names = [name for name in THINKING_SWITCHES if name in template.variables]
    switches: Mapping[str, object] = {}
    used: dict[str, bool] = {}
    if fields.thinking is not None:
        switches = dict.fromkeys(names, fields.thinking)
        used[fields.thinking_field] = bool(names)
    effort: Effort | None = None
    if sent is not None:
        is_off = sent == "none" and bool(names)
        if is_off:
            switches = dict.fromkeys(names, False)
        if sent in efforts or not is_off:
            effort = cast(Effort | None, nearest_effort(sent, efforts))
        used[fields.effort_field] = used.get(fields.effort_field, False) or is_off or effort is not None
        if effort not in (None, sent):
            accepted = ", ".join(efforts)
            warnings = [f"{fields.effort_field}: {sent} became {effort}: the model's chat template accepts {accepted}"]
    kwargs = {**switches, **conversation.template_kwargs}
    fitted = replace(conversation, reasoning_effort=effort, template_kwargs=kwargs)
    return FittedReasoning(fitted, [field for field, is_used in used.items() if not is_used], warnings)


def _variables(conversation: Conversation, template: ChatTemplate) -> dict[str, object]:
    """The template's variables from the fields of the same names."""
    variables: dict[str, object] = {}
    if conversation.prompt_tools and "tools" in template.variables:
        variables["tools"] = [tool.for_template() for tool in conversation.prompt_tools]
    if conversation.documents:
        if "documents" not in template.variables:
            message = "documents is not supported: the model's chat template does not use it."
            raise UnsupportedField(message, param="documents")
        variables["documents"] = list(conversation.documents)
    if conversation.reasoning_effort is not None:
        variables["reasoning_effort"] = conversation.reasoning_effort
    return variables


def _cut(text: str) -> str:
    cut = cut_at_mark(text)
    if cut is None:
        message = "continue_final_message is not supported: the model's chat template leaves out the last message."
        raise UnsupportedField(message, param="continue_final_message")
    return cut
