"""The template of a call, split at its places into what the parser looks for."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from proa_gateway.parsing.format import Envelope, NamedIds, PythonCall, Tagged, ToolFormat

_PLACE = re.compile(r"\$(name|id|arguments)")
_NAME = r"(?P<name>[^\n]+?)"
_IDENTIFIER = r"(?P<name>[^\W\d][\w.\-]*)"
_IDENTIFIER_BEGINS = re.compile(r"\s*(?:[^\W\d][\w.\-]*)?\s*")


@dataclass(frozen=True, slots=True)
class Header:
    """What stands between the token that opens a call and its arguments.

    `whole` has the group `name`, and `id` if the model writes one. `begins` matches all that may still become a header;
    None if the format's opening makes it certain enough to wait for the end.
    """

    whole: re.Pattern[str]
    begins: re.Pattern[str] | None


@dataclass(frozen=True, slots=True)
class CallTemplate:
    """The pieces before the name and after the arguments. An `Envelope` belongs to neither."""

    opening: tuple[str, ...]
    closing: tuple[str, ...]


def pieces(text: str, added_tokens: Collection[str]) -> tuple[str, ...]:
    """Split a text at added tokens, which are pieces, and at line ends. Pieces have no whitespace around them."""
    tokens = sorted((token for token in added_tokens if token.strip() and token in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})|\n" if tokens else "\n", text)
    return tuple(part.strip() for part in parts if part and part.strip())


def call_template(tool_format: ToolFormat, added_tokens: Collection[str]) -> CallTemplate:
    call = tool_format.call
    if isinstance(tool_format.arguments, Envelope):
        opening, closing = call[: call.index("{")], call[call.rindex("}") + 1 :]
    else:
        opening, *_, closing = _PLACE.split(call)
    return CallTemplate(pieces(opening, added_tokens), pieces(closing, added_tokens))


def call_header(tool_format: ToolFormat, opening: Iterable[str], added_tokens: Collection[str]) -> Header | None:
    """The header of a call after whose first token these pieces come. None for an envelope: its reader has the name."""
    if isinstance(tool_format.arguments, Envelope):
        return None
    call = tool_format.call
    header = call[call.index("$") : call.index("$arguments")]
    before, optional, after = header.partition(tool_format.optional) if tool_format.optional else (header, "", "")
    whole = [_spaced(opening), _pattern(tool_format, before, added_tokens)]
    if optional:
        whole.append(f"(?:{_pattern(tool_format, optional, added_tokens)})?")
    whole.append(_pattern(tool_format, after, added_tokens))
    if not _PLACE.split(header)[-1].strip():
        whole.append(f"(?={'|'.join(map(re.escape, _ends(tool_format, added_tokens)))})")
    is_identifier = isinstance(tool_format.arguments, PythonCall)
    return Header(re.compile("".join(whole)), _IDENTIFIER_BEGINS if is_identifier else None)


def _pattern(tool_format: ToolFormat, text: str, added_tokens: Collection[str]) -> str:
    """Matches a part of a call, with whitespace around its pieces."""
    parts = _PLACE.split(text)  # texts and places in turn
    patterns = [_spaced(pieces(parts[0], added_tokens))] if parts[0] else []
    for place, after in zip(parts[1::2], parts[2::2], strict=True):
        patterns += [_place(tool_format, place), _spaced(pieces(after, added_tokens))]
    return "".join(patterns)


def _place(tool_format: ToolFormat, place: str) -> str:
    if place == "name":
        return _IDENTIFIER if isinstance(tool_format.arguments, PythonCall) else _NAME
    if isinstance(tool_format.call_ids, NamedIds) and "$name" not in tool_format.call:
        template = re.escape(tool_format.call_ids.template)
        return f"(?P<id>{template.replace(re.escape('$name'), _NAME).replace(re.escape('$index'), '[0-9]+')})"
    return r"(?P<id>[^\n]+?)"


def _spaced(texts: Iterable[str]) -> str:
    return "".join(rf"\s*{re.escape(text)}" for text in texts) + r"\s*"


def _ends(tool_format: ToolFormat, added_tokens: Collection[str]) -> tuple[str, ...]:
    """What ends a name that has nothing of its own after it: the arguments' first piece, or the call's closing."""
    closing = call_template(tool_format, added_tokens).closing[:1]
    if isinstance(tool_format.arguments, Tagged):
        before_key = tool_format.arguments.template.partition("$key")[0]
        return (*pieces(before_key, added_tokens)[:1], *closing)
    return ("{", *closing)
