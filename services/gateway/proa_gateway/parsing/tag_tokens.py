"""Which added tokens of a tokenizer are tags of a format, and which are parts of its tags.

A tokenizer may have a token for all of a tag, such as `<tool_call>`, for the mark that all tags begin with, or for a
word within one. The parser finds a token that is a tag by its id, so that the same characters in other tokens are text.
It reads a token that is a part as text: found by its id, it would cut the tag in two, of which the first may begin
other tags too.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from proa.grammar.lark import split
from proa_gateway.parsing.format import ArgumentsSyntax, CallObject, CallTexts, ObjectLiteral, Tagged, ToolFormat

_BRACKETS = "]})"
_PLACES = re.compile(r"\$(?:key|value|is_string|type)")


def tag_tokens(tool_format: ToolFormat, added_tokens: Mapping[str, int]) -> dict[str, int]:
    """Return those of the added tokens that the parser finds by their ids."""
    tags = _Tags.of(tool_format)
    within = {token: token_id for token, token_id in added_tokens.items() if token and tags.contain(token)}
    return {token: token_id for token, token_id in within.items() if tags.has(token, within)}


@dataclass(frozen=True, slots=True)
class _Tags:
    """Lines of a format's texts. `openings`: the first lines of what opens something; `parts`: what follows them, up to
    the arguments. `whole`: what is looked for as it is. `arguments`: the tags of arguments."""

    openings: Collection[str]
    closings: Collection[str]  # the lines of what closes something
    whole: Collection[str]
    arguments: Collection[str]
    parts: Collection[str]

    @classmethod
    def of(cls, tool_format: ToolFormat) -> "_Tags":
        call, channels = CallTexts.of(tool_format), tool_format.channels
        pairs = [pair for pair in (tool_format.reasoning, tool_format.section) if pair is not None]
        of_calls = (call.opening, *tool_format.also_opens)
        openings = [_lines(text) for text in (*(opening for opening, _ in pairs), *of_calls)]
        is_object = isinstance(tool_format.arguments, CallObject)  # which follows the opening of the call
        others = (channels.open, channels.body, *channels.close, channels.next) if channels else (tool_format.between,)
        return cls(
            openings=[*(line for lines in openings for line in lines[:1]), *_lines(*others)],
            closings=_lines(*(closing for _, closing in pairs), call.closing),
            whole=_lines(*tool_format.dropped, *(of_calls if is_object else ())),
            arguments=_lines(*_texts_of(tool_format.arguments)),
            parts=[*(line for lines in openings for line in lines[1:]), *_lines(*call.inner)],
        )

    def contain(self, token: str) -> bool:
        return any(token in line for line in (*self._found, *self.arguments, *self.parts))

    def has(self, token: str, contained: Mapping[str, int]) -> bool:
        """Whether the token is a tag, or begins or ends one that can be found by it, wherever the format has it.
        `contained`: all tokens that the tags contain."""
        if token[0] in _BRACKETS or not any(map(str.isalnum, token)):
            return False  # arguments may have such a token, or end with its first character
        if any(token in line for line in (*self.arguments, *self.parts)):
            return False
        lines = [line for line in self._found if token in line]
        if sum(line.startswith(token) for line in lines) > 1:
            return False
        return all(self._is_apart(token, line) and _is_cut_at(token, line, contained) for line in lines)

    @property
    def _found(self) -> set[str]:
        """The lines that are looked for outside of calls."""
        return {*self.openings, *self.closings, *self.whole}

    def _is_apart(self, token: str, line: str) -> bool:
        """Whether the rest of the line can be told from other tags without the token."""
        before, _, after = line.partition(token)
        if line in self.whole:
            return token == line
        if token in after or (before and line in self.openings) or (after and line in self.closings):
            return False
        others = {*self._found, *self.arguments} - {line}
        return not before or not any(other.startswith(before) for other in others)


def _is_cut_at(token: str, line: str, tokens: Mapping[str, int]) -> bool:
    """Whether a tokenizer with these tokens finds this one in the line: no other overlaps it."""
    return (token, tokens[token]) in split(line, tokens)


def _lines(*texts: str) -> list[str]:
    return [line.strip() for text in texts for line in text.split("\n") if line.strip()]


def _texts_of(arguments: ArgumentsSyntax) -> Iterable[str]:
    match arguments:
        case Tagged(template, quotes):
            return (*_PLACES.split(template), *(quotes or ()))
        case ObjectLiteral(quote):
            return (quote,)
    return ()
