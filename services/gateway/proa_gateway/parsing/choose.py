"""Choose a model's tool format: by name, by transformers' `response_template`, or by its chat template."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proa_gateway.parsing.format import ArgumentsSyntax, CallObject, Json, ObjectLiteral, Tagged, ToolFormat
from proa_gateway.parsing.known_formats import KnownFormats

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_GROUP = re.compile(r"\(\?P<(name|key|value)>(?:[^()\\]|\\.)*\)")
_SPACE = re.compile(r"\\s[*+]?\??")
_OTHER_SYNTAX = re.compile(r"(?<!\\)[.^*+?\[\]()|]|\\[a-zA-Z]")
_PLACE = "\0"  # stands for `$`, which has a meaning in patterns


def format_of_response_template(template: object) -> ToolFormat | None:
    """Return the format that a tokenizer's response template describes. None if there is no template, or if no
    `ToolFormat` can express its calls."""
    fields = _mapping(_mapping(template).get("fields"))
    calls = _mapping(fields.get("tool_calls"))
    opening, closing = _anchor(calls, "open"), _anchor(calls, "close")
    arguments = _arguments(calls)
    if not opening or closing is None or arguments is None:
        return None
    if not isinstance(arguments, CallObject) and "$name" not in opening:
        return None
    return ToolFormat(
        name="response_template",
        signs=(),
        call=opening + _body(arguments) + closing,
        arguments=arguments,
        reasoning=_reasoning(fields),
    )


def is_same_format(one: ToolFormat, other: ToolFormat) -> bool:
    """Whether models write both in the same way but for whitespace, which a response template does not tell."""
    return _without_space(one) == _without_space(other)


def _arguments(calls: Mapping[str, Any]) -> ArgumentsSyntax | None:
    content_args = _mapping(calls.get("content_args"))
    match calls.get("content"), content_args:
        case "json", {"unquoted_keys": True, "string_delims": [[str(opening), str(closing)]]} if opening == closing:
            return ObjectLiteral(opening)
        case "json", _ if not content_args.keys() & {"unquoted_keys", "string_delims"}:
            is_envelope = _mapping(calls.get("transform")).get("function") == "{content}"
            return CallObject(name="name", arguments="arguments") if is_envelope else Json()
        case "xml-inline", {"tag_pattern": str(pattern)}:
            tag = _literal(pattern)
            return Tagged(tag) if tag and "$key" in tag and "$value" in tag else None
    return None


def _body(arguments: ArgumentsSyntax) -> str:
    match arguments:
        case CallObject():
            return '{"name": "$name", "arguments": $arguments}'
        case ObjectLiteral():
            return "{$arguments}"
    return "$arguments"


def _reasoning(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    field = next((_mapping(fields[name]) for name in _REASONING_FIELDS if name in fields), {})
    opening, closing = _anchor(field, "open"), _anchor(field, "close")
    return (opening, closing) if opening and closing else None


def _anchor(field: Mapping[str, Any], side: str) -> str | None:
    """The text that opens or closes a field, with places; None if it is not one text."""
    value = field.get(side)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else _literal(field.get(f"{side}_pattern"))


def _literal(pattern: object) -> str | None:
    """The text that a pattern matches, with places for its groups and without whitespace; None if there are several."""
    if not isinstance(pattern, str):
        return None
    text = _SPACE.sub("", _GROUP.sub(rf"{_PLACE}\1", pattern))
    return None if _OTHER_SYNTAX.search(text) else re.sub(r"\\(.)", r"\1", text).replace(_PLACE, "$")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _without_space(tool_format: ToolFormat) -> tuple[object, ...]:
    arguments = tool_format.arguments
    syntax = "".join(arguments.template.split()) if isinstance(arguments, Tagged) else type(arguments)
    reasoning = [text.strip() for text in tool_format.reasoning or ()]
    call = tool_format.call.replace(tool_format.optional, "")
    return "".join(call.split()), syntax, reasoning


def choose_format(
    name: str | None, response_template: object, chat_template: str, known: KnownFormats
) -> ToolFormat | None:
    """The format called `name` if given, else that of the tokenizer's `response_template`, else the first whose signs
    all stand in the chat template. None: the model has none that is known. Raises `ValueError` for unknown names."""
    if name is not None:
        return known.tool_format(name)
    if (described := format_of_response_template(response_template)) is not None:
        return next((each for each in known.tools if is_same_format(each, described)), described)
    found = next((each for each in known.tools if _has_signs(chat_template, each)), None)
    if found is not None and found.reasoning is not None and found.reasoning[1].strip() not in chat_template:
        return replace(found, reasoning=None)
    return found


def _has_signs(chat_template: str, tool_format: ToolFormat) -> bool:
    """A format without signs is only chosen by its name."""
    return bool(tool_format.signs) and all(sign in chat_template for sign in tool_format.signs)
