"""ToolFormat: how a family of models writes reasoning and tool calls. Each is a constant in `formats.py`, or in an
installed package.

The parser, the grammar for constrained calls and the choice of a model's format are made from the same description.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

PLACE = re.compile(r"\$(name|id|index|arguments)")
"""In the call of a format."""

INPUT = "input"
"""The only argument of a custom tool, which is a function for the model."""
INPUT_SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """Of the input of a custom tool: a grammar in Lark, or a regular expression that matches all of it."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """`parameters`: JSON schema of the arguments. `strict`: calls must match it, or the request is refused. `text`: of
    the only argument, `input`, in place of `parameters`."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False
    text: TextGrammar | None = None


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The tool that the model must call."""

    name: str


ToolChoice = Literal["auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class Json:
    """The arguments are a JSON object."""


@dataclass(frozen=True, slots=True)
class CallObject:
    """The call is a JSON object with these two keys, in any order; its other keys are ignored.

    `aliases`: keys that models also write for `arguments`.
    """

    name: str  # key of the function's name
    arguments: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tagged:
    """The arguments are repetitions of `template`, which has the places `$key` and `$value`; `$key` also after the
    value, if the key is the name of the tag. The parts of objects and arrays then stand in such tags too.

    A value is the text itself if the tool's schema takes a string there, otherwise JSON. Where the model writes which
    it is, as true or false, `template` has the place `$is_string`; where it writes the name of the value's JSON type,
    `$type`.
    `quotes`: what may stand around a text that could be taken for tags; None: nothing.
    """

    template: str
    quotes: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ObjectLiteral:
    """The arguments are those of an object with keys without quotes, `days:3,dates:[]`, without the brackets around.

    Strings stand between two `quote`s, without escapes.
    """

    quote: str


@dataclass(frozen=True, slots=True)
class PythonCall:
    """The arguments are those of a Python call, `city="Rome", days=3`, with Python's literals."""


ArgumentsSyntax = Json | CallObject | Tagged | ObjectLiteral | PythonCall


@dataclass(frozen=True, slots=True)
class RandomIds:
    """A call's id is `prefix` and `length` random characters of `alphabet`."""

    prefix: str
    alphabet: str
    length: int


@dataclass(frozen=True, slots=True)
class NamedIds:
    """A call's id is `template`, with the places `$name` and `$index`.

    Where `call` of the format has no `$name`, the name is taken from the id at `$id`.
    """

    template: str


CALL_IDS = RandomIds(prefix="call_", alphabet="0123456789abcdef", length=24)


class Route(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class Channels:
    """An answer that consists of several messages, each with a header that says what its body is.

    A header is the text around `open`, up to `body`; `open` may be empty. A message ends with one of `close`; `next`
    begins another.
    `routes`: regular expressions with the kind of a body. The first one counts that matches the header from its start,
    where a header is what stands after `open`, a space, and what stands before it. That of a call has a group `name` if
    the body is its arguments; a body that is to hold calls with names and begins with none is content.
    `reasoning`, `preamble` and `answer`: the headers of these, as the model is to write them.
    `bare`: what a header begins with that models also write in a body, without the end of its message: after
    whitespace, and without a space in the rest. Empty: there is none.
    """

    open: str
    body: str
    close: tuple[str, ...]
    next: str
    routes: tuple[tuple[str, Route], ...]
    reasoning: str
    preamble: str
    answer: str
    bare: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`signs`: texts that all stand in the chat template of a model with this format. Without any, the format is only
    chosen by its name.
    `call`: one call as the model is to write it, with the places `$name`, `$arguments` and, if the model writes an id
    or the number of the call in its message, `$id` or `$index`. Whitespace around them, and before and after line ends,
    may differ in what the model writes. In channels, all of the message, without what opens it and what closes it.
    `optional`: a part of `call`, between its places, that the model may write. The grammar leaves it out.
    `arguments`: how `$arguments` is written; with an `CallObject`, all from `{` to `}`.
    `reasoning`: its opening and its closing.
    `between`: stands between two calls. In channels without it, a call ends the output.
    `section`: opening and closing of all the calls.
    `also_opens`: texts that begin a call as well: ends of the part of `call` before `$name`, or tokens in its place.
    `at_start`: the calls, or their section, are recognized only where the content begins, since their opening is empty
    or common in other text.
    `dropped`: texts in the content that are not shown.
    """

    name: str  # as `--tool-call-parser` names it
    signs: tuple[str, ...]
    call: str
    arguments: ArgumentsSyntax
    reasoning: tuple[str, str] | None = None
    between: str = ""
    optional: str = ""
    section: tuple[str, str] | None = None
    also_opens: tuple[str, ...] = ()
    at_start: bool = False
    dropped: tuple[str, ...] = ()
    call_ids: RandomIds | NamedIds = CALL_IDS  # of calls to which the model writes no id
    channels: Channels | None = None  # None: an answer is one message

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning can be distinguished from the rest."""
        return self.reasoning is not None or self.channels is not None

    @property
    def call_in_body(self) -> str:
        """The call without the header of its message."""
        return self.call if self.channels is None else self.call.partition(self.channels.body)[2]

    @property
    def is_named_in_header(self) -> bool:
        """Whether the name of a call only stands in the header of its message."""
        return self.channels is not None and "$name" not in self.call_in_body


@dataclass(frozen=True, slots=True)
class CallTexts:
    """The texts of a format's call, without the header of a message: `opening` before its first place, `closing` after
    the arguments, `inner` between the places. The braces of a `CallObject` are in `inner`."""

    opening: str
    inner: tuple[str, ...]
    closing: str

    @classmethod
    def of(cls, tool_format: ToolFormat) -> "CallTexts":
        call = tool_format.call_in_body
        if isinstance(tool_format.arguments, CallObject):
            begin, end = call.index("{"), call.rindex("}") + 1
            return cls(call[:begin], tuple(PLACE.split(call[begin:end])[::2]), call[end:])
        opening, *inner, closing = PLACE.split(call)[::2]
        return cls(opening, tuple(inner), closing)
