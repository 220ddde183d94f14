"""The chat template's input and output: a conversation's messages and variables to the prompt's text."""

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proa.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateTooCostly, ContentForms, cut_at_mark, marked
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.serving.content import ContentFormat, as_read, forms_of, text_of
from proa_gateway.serving.conversation import REASONING_FIELDS, ChatMessage, Conversation, ReasoningFields, ToolCall
from proa_gateway.tokenizer import TemplateRenderer

THINKING_SWITCHES = ("enable_thinking", "thinking")


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


"""Variables of chat templates that switch reasoning on or off."""


async def render_prompt(
    conversation: Conversation,
    template: ChatTemplate,
    renderer: TemplateRenderer,
    content_format: ContentFormat = "auto",
    *,
    placeholder: str = "",
) -> str:
    """`placeholder`: what stands for an image. Raises `InvalidRequest` if the template refuses the messages or does not
    use a field that is set, and `ChatTemplateTooCostly`."""
    text = await _render(
        conversation, template, renderer, content_format, placeholder, opens_message=conversation.opens_message
    )
    return _cut(text) if conversation.continues_message else text


async def generation_prompt(
    conversation: Conversation,
    template: ChatTemplate,
    renderer: TemplateRenderer,
    prompt: str,
    content_format: ContentFormat = "auto",
    *,
    placeholder: str = "",
) -> str:
    """The end of the prompt that begins the answer: what the template adds for it, or the message to be continued."""
    if conversation.continues_message:
        return text_of(conversation.messages[-1].content)
    if not conversation.opens_message:
        return ""
    history = await _render(conversation, template, renderer, content_format, placeholder, opens_message=False)
    return prompt[num_common(prompt, history) :]


def num_common(one: str, other: str) -> int:
    """The characters with which both texts begin."""
    if one.startswith(other):
        return len(other)
    return bisect(range(len(one)), False, key=lambda length: not other.startswith(one[: length + 1]))


async def _render(
    conversation: Conversation,
    template: ChatTemplate,
    renderer: TemplateRenderer,
    content_format: ContentFormat,
    placeholder: str,
    *,
    opens_message: bool,
) -> str:
    forms = forms_of(template, content_format)
    messages = template_messages(conversation.messages, forms, placeholder=placeholder, keeps_null=template.tests_none)
    if conversation.continues_message:
        messages[-1]["content"] = marked(messages[-1].get("content") or "")
    variables = {**conversation.template_kwargs, **_variables(conversation, template)}
    try:
        return await renderer.render(template, messages, variables, add_generation_prompt=opens_message)
    except ChatTemplateTooCostly:
        raise
    except ChatTemplateError as error:
        raise InvalidRequest(f"The model's chat template refuses the messages: {error}", param="messages") from error


def fit_reasoning(
    conversation: Conversation, template: ChatTemplate, fields: ReasoningFields
) -> tuple[Conversation, list[str]]:
    """Return the conversation with what the template uses of its reasoning fields, and the paths of the unused ones."""
    thinking = fields.thinking
    switches = {} if thinking is None else {name: thinking for name in THINKING_SWITCHES if name in template.variables}
    effort = conversation.reasoning_effort if "reasoning_effort" in template.variables else None
    used: dict[str, bool] = {}
    if thinking is not None:
        used[fields.thinking_field] = bool(switches)
    if conversation.reasoning_effort is not None:
        used[fields.effort_field] = used.get(fields.effort_field, False) or effort is not None
    kwargs = {**switches, **conversation.template_kwargs}
    unused = [field for field, is_used in used.items() if not is_used]
    return replace(conversation, reasoning_effort=effort, template_kwargs=kwargs), unused


def _variables(conversation: Conversation, template: ChatTemplate) -> dict[str, object]:
    """The template's variables from the fields of the same names."""
    variables: dict[str, object] = {}
    if conversation.prompt_tools:
        _check_used(template, "tools", ("tools",))
        variables["tools"] = [tool.for_template() for tool in conversation.prompt_tools]
    if conversation.documents:
        _check_used(template, "documents", ("documents",))
        variables["documents"] = list(conversation.documents)
    if conversation.reasoning_effort is not None:
        # Templates that can only switch reasoning off do not know how much of it is asked for.
        switches: Sequence[str] = THINKING_SWITCHES if conversation.reasoning_effort == "none" else ()
        _check_used(template, "reasoning_effort", ("reasoning_effort", *switches))
        variables |= {"reasoning_effort": conversation.reasoning_effort, **dict.fromkeys(switches, False)}
    return variables


def _check_used(template: ChatTemplate, field: str, names: Sequence[str]) -> None:
    if template.variables.isdisjoint(names):
        raise UnsupportedField(f"{field} is not supported: the model's chat template does not use it.", param=field)


def _cut(text: str) -> str:
    cut = cut_at_mark(text)
    if cut is None:
        message = "continue_final_message is not supported: the model's chat template leaves out the last message."
        raise UnsupportedField(message, param="continue_final_message")
    return cut
