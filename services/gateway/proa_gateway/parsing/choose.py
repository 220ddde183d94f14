"""Choose a model's tool format: by name, by transformers' `response_template`, or by its chat template."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """`unread`: the name of the format that was named or whose signs were found, and that does not read the call of the
    chat template; empty: there is none."""

    tool_format: ToolFormat | None  # None: no format is known for the model
    unread: str = ""


def choose_format(
    name: str | None,
    response_template: object,
    chat_template: str,
    known: KnownFormats,
    reads_call: Callable[[ToolFormat], bool],
) -> FormatChoice:
    """The format called `name` if given, else that of the tokenizer's `response_template`, else the first whose signs
    all stand in the chat template. None: the model has none that is known. Raises `ValueError` for unknown names.

    `reads_call`: whether a format reads the call that the chat template writes in a history. Only a format with a name
    is chosen if it does not. The format has reasoning only if what closes it stands in the chat template.
    """
    if name is not None:
        named = known.tool_format(name)
        return FormatChoice(_with_template(named, chat_template), "" if reads_call(named) else name)
    found = _described(response_template, known) or [
        _with_template(each, chat_template) for each in known.tools if _has_signs(chat_template, each)
    ]
    chosen = next(filter(reads_call, found), None)
    return FormatChoice(chosen, found[0].name if found and chosen is None else "")


def _described(response_template: object, known: KnownFormats) -> list[ToolFormat]:
    described = format_of_response_template(response_template)
    if described is None:
        return []
    same = [each for each in known.tools if is_same_format(each, described)]
    # A response template does not tell of texts that are not shown.
    return [min(same, key=lambda each: len(each.dropped), default=described)]


def _with_template(tool_format: ToolFormat, chat_template: str) -> ToolFormat:
    """A model whose template does not know the reasoning of others with its format of calls writes none."""
    if tool_format.reasoning is not None and tool_format.reasoning[1].strip() not in chat_template:
        return replace(tool_format, reasoning=None)
    return tool_format


def _has_signs(chat_template: str, tool_format: ToolFormat) -> bool:
    """A format without signs is only chosen by its name."""
    return bool(tool_format.signs) and all(sign in chat_template for sign in tool_format.signs)
