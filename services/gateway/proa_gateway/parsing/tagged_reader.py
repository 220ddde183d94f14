"""TaggedReader: arguments that each stand between tags, such as `<parameter=city>\\nOslo\\n</parameter>`."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

from proa.grammar.schema_forms import TYPES
from proa_gateway.parsing.format import Tagged
from proa_gateway.parsing.json_text import PYTHON_WORDS, OpenString, escape, held_back, quoted
from proa_gateway.parsing.literal_reader import literal_to_json
from proa_gateway.parsing.nested_tags import nested_to_json
from proa_gateway.parsing.schema_types import WORDS, Schema, allowed_types, is_text, property_schema, type_of

_PLACES = re.compile(r"\$(?:key|is_string|type)")


@dataclass(frozen=True, slots=True)
class Tags:
    """The text around the key and the value of one argument. The model may leave out whitespace beside tags."""

    open: str  # before the key
    after_key: str  # a tag or quote; empty: the key ends at `header_end`
    header_end: str  # what ends the tag before the value
    before_value: str  # whitespace, as is `after_value`
    after_value: str
    close: str  # with `$key` if the key is the tag's name
    quotes: tuple[str, str] | None = None  # that may stand around a value

    @classmethod
    def of(cls, syntax: Tagged) -> "Tags":
        header, _, after_value = syntax.template.partition("$value")
        before_key, *between = _PLACES.split(header)
        header = between[-1].rstrip()
        header_end = header[max(header.rfind("<"), 0) :]
        close = after_value.lstrip()
        return cls(
            open=before_key.strip(),
            after_key="".join(between)[: -len(between[-1])].strip() or header.removesuffix(header_end).strip(),
            header_end=header_end,
            before_value=between[-1][len(header) :],
            after_value=after_value[: len(after_value) - len(close)],
            close=close.rstrip(),
            quotes=syntax.quotes,
        )

    @property
    def has_keys_as_names(self) -> bool:
        """Whether the key is the tag's name. The parts of a value then stand in such tags too."""
        return "$key" in self.close

    def close_of(self, key: str) -> str:
        """What closes the value of this key."""
        return self.close.replace("$key", key)


def to_json(text: str, types: frozenset[str]) -> str:
    """The text itself if it is JSON of one of the types, else what Python would read, else a string."""
    if is_text(types):
        return text if WORDS.get(text) in types else quoted(text)
    value = text.strip()
    value = PYTHON_WORDS.get(value, value)
    if (type_ := _type(value)) is None and value.startswith(("{", "[")):
        value = literal_to_json(value) or ""
        type_ = _type(value)
    if type_ in types or (type_ == "integer" and "number" in types):
        return value
    return quoted(text) if type_ is None or "string" in types else value


def _type(text: str) -> str | None:
    """Return the JSON type of a value given as text. None: the text is not JSON."""
    try:
        return type_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


class _TagState(Enum):
    BETWEEN = auto()
    HEADER = auto()
    VALUE_BEGINS = auto()
    WORD_OR_STRING = auto()  # nothing was sent of the value
    STRING = auto()  # sent as it comes
    OTHER = auto()  # collected, and converted at its end
    COMPLETE = auto()


class TaggedReader:
    """An `ArgumentsReader`. The arguments are complete at the first text that does not open another one.

    A value whose schema allows strings, and nothing else but words such as null, is sent as it comes; others once they
    have ended.
    """

    __slots__ = (
        "_close",
        "_collected",
        "_num_tags_in_strings",
        "_num_values",
        "_parameters",
        "_pending",
        "_schema",
        "_state",
        "_string_state",
        "_tags",
        "_types",
    )

    def __init__(self, tags: Tags, parameters: Schema) -> None:
        """`parameters`: the JSON schema of the tool's arguments."""
        self._tags = tags
        self._parameters = parameters
        self._schema: object = None  # of the value being read
        self._types: frozenset[str] = frozenset()  # that it may have
        self._close = ""  # what ends it
        self._state = _TagState.BETWEEN
        self._pending = ""  # text that is not understood without what follows
        self._collected: list[str] = []  # of the header or the value being read
        self._num_values = 0  # those that have begun
        self._string_state = OpenString()  # of a value that may be JSON
        self._num_tags_in_strings = 0  # closing tags that did not end that value

    @property
    def is_complete(self) -> bool:
        return self._state is _TagState.COMPLETE

    @property
    def rest(self) -> str:
        return self._pending if self.is_complete else ""

    def feed(self, text: str) -> str:
        self._pending += text
        written: list[str] = []
        state = None
        while state is not self._state:  # until it takes more text to go on
            state = self._state
            written.append(_STEPS[state](self))
        return "".join(written)

    def close(self, *, by_model: bool) -> str:
        """What has not ended stays open, so that a truncated call is no valid JSON."""
        written = ""
        if self._state is _TagState.OTHER and self._num_tags_in_strings:
            self._read_again("")
            written = self.feed("")
        if self._state is _TagState.BETWEEN:
            return written + (self._complete() if by_model else "")
        rest, self._pending = self._pending, ""
        return written + (escape(rest) if self._state is _TagState.STRING else "")

    def _between(self) -> str:
        self._pending = self._pending.lstrip()
        opening = self._tags.open
        if self._pending.startswith(opening):
            rest = self._pending.removeprefix(opening)
            if opening.endswith("<") and rest[:1] in ("", "/"):  # perhaps a closing tag, of the call
                return self._complete() if rest else ""
            self._pending = rest
            self._state = _TagState.HEADER
        elif not opening.startswith(self._pending):
            return self._complete()
        return ""

    def _complete(self) -> str:
        self._state = _TagState.COMPLETE
        return "}" if self._num_values else "{}"

    def _header(self) -> str:
        if not self._ends(self._tags.header_end):
            return ""
        header = self._take_collected()
        key, _, attribute = header.partition(self._tags.after_key) if self._tags.after_key else (header, "", "")
        key = key.strip()
        self._schema = property_schema(self._parameters, key)
        self._types = _types_of_attribute(attribute) or allowed_types(self._schema, self._parameters)
        self._num_values += 1
        self._close = self._tags.close_of(key)
        self._state = _TagState.VALUE_BEGINS
        return f"{'{' if self._num_values == 1 else ', '}{quoted(key)}: "

    def _value_begins(self) -> str:
        before = self._tags.before_value
        if not self._pending.startswith(before) and before.startswith(self._pending):
            return ""
        value = self._pending.removeprefix(before)
        if self._tags.quotes is not None:
            opening, closing = self._tags.quotes
            if value.startswith(opening):
                value, self._close = value.removeprefix(opening), closing + self._close
            elif opening.startswith(value):
                return ""
        self._pending = value
        self._state = _TagState.WORD_OR_STRING if is_text(self._types) else _TagState.OTHER
        self._string_state, self._num_tags_in_strings = OpenString(), 0
        return ""

    def _word_or_string(self) -> str:
        ended = self._value_ends()
        value = "".join(self._collected)
        if ended:
            self._take_collected()
            return to_json(value, self._types)
        if any(word.startswith(value) for word, type_ in WORDS.items() if type_ in self._types) or not value:
            return ""
        self._take_collected()
        self._state = _TagState.STRING
        return f'"{escape(value)}'

    def _string(self) -> str:
        ended = self._value_ends()
        return escape(self._take_collected()) + ('"' if ended else "")

    def _other(self) -> str:
        """A closing tag within a string of JSON belongs to it."""
        string = self._string_state
        while True:
            num_collected = len(self._collected)
            ended = self._ends(self._close)
            string.feed("".join(self._collected[num_collected:]))
            if self._num_tags_in_strings and not string.may_be_json:
                string = self._read_again(self._close if ended else "")
            elif not ended:
                return ""
            elif string.is_open:
                self._num_tags_in_strings += 1
                self._collected.append(self._close)
            else:
                self._state = _TagState.BETWEEN
                return self._converted(self._take_collected().removesuffix(self._tags.after_value))

    def _converted(self, value: str) -> str:
        """The JSON of a value that has ended."""
        nested = None
        if self._tags.has_keys_as_names:
            nested = nested_to_json(value, self._tags.open, self._schema, self._parameters, to_json)
        return to_json(value, self._types) if nested is None else nested

    def _read_again(self, end: str) -> OpenString:
        """The value is no JSON after all: read it from its start, so that its first closing tag ends it."""
        self._pending = f"{self._take_collected()}{end}{self._pending}"
        self._string_state, self._num_tags_in_strings = OpenString(may_be_json=False), 0
        return self._string_state

    def _take_collected(self) -> str:
        text = "".join(self._collected)
        self._collected.clear()
        return text

    def _value_ends(self) -> bool:
        """Collect text of the value. At its end: go to the state after it, and return True."""
        if not self._ends(self._close, self._tags.after_value):
            return False
        self._state = _TagState.BETWEEN
        return True

    def _ends(self, end: str, whitespace: str = "") -> bool:
        """Collect text up to `end`, which is dropped together with `whitespace` before it. Return whether it came."""
        text, found, self._pending = self._pending.partition(end)
        if found:
            self._collected.append(text.removesuffix(whitespace))
            return True
        held = max(held_back(text, end), held_back(text, whitespace + end))
        self._collected.append(text[: len(text) - held])
        self._pending = text[len(text) - held :]
        return False


def _types_of_attribute(attribute: str) -> frozenset[str]:
    """The types that `$is_string` or `$type` allows. Empty: it is not there."""
    if (name := attribute.strip(' "')) in TYPES:
        return frozenset({name})
    if "true" in attribute:
        return frozenset({"string"})
    return TYPES - {"string"} if "false" in attribute else frozenset()


_STEPS: dict[_TagState, Callable[[TaggedReader], str]] = {
    _TagState.BETWEEN: TaggedReader._between,
    _TagState.HEADER: TaggedReader._header,
    _TagState.VALUE_BEGINS: TaggedReader._value_begins,
    _TagState.WORD_OR_STRING: TaggedReader._word_or_string,
    _TagState.STRING: TaggedReader._string,
    _TagState.OTHER: TaggedReader._other,
    _TagState.COMPLETE: lambda reader: "",
}
