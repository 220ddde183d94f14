"""TaggedReader: arguments that each stand between tags, such as `<parameter=city>\\nOslo\\n</parameter>`."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

from proa_gateway.parsing.json_text import PYTHON_WORDS, OpenString, escape, held_back, quoted
from proa_gateway.parsing.literal_reader import literal_to_json
from proa_gateway.parsing.schema_types import TYPES, WORDS, Schema, allowed_types, is_text, property_schema, type_of

_PLACES = re.compile(r"\$(?:key|is_string|value)")


@dataclass(frozen=True, slots=True)
class Tags:
    """The text around the key and the value of one argument. The model may leave out whitespace beside tags."""

    open: str
    after_key: str  # a tag or quote; empty: the key ends at `header_end`
    header_end: str  # what ends the tag before the value
    before_value: str  # whitespace, as is `after_value`
    after_value: str
    close: str

    @classmethod
    def of(cls, item: str) -> "Tags":
        """`item`: one argument as the model is to write it, with `$key` and `$value`, and with `$is_string` where the
        model writes whether the value is a string, as true or false."""
        before_key, *between, after_value = _PLACES.split(item)
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
        )


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
        "_collected",
        "_num_tags_in_strings",
        "_num_values",
        "_parameters",
        "_pending",
        "_state",
        "_string_state",
        "_tags",
        "_types",
    )

    def __init__(self, tags: Tags, parameters: Schema) -> None:
        """`parameters`: the JSON schema of the tool's arguments."""
        self._tags = tags
        self._parameters = parameters
        self._types: frozenset[str] = frozenset()  # that the value being read may have
        self._state = _TagState.BETWEEN
        self._pending = ""  # text that is not understood without what follows
        self._collected: list[str] = []  # of the header or the value being read
        self._num_values = 0
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
        if self._pending.startswith(self._tags.open):
            self._pending = self._pending.removeprefix(self._tags.open)
            self._state = _TagState.HEADER
        elif not self._tags.open.startswith(self._pending):
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
        self._types = _types_of_attribute(attribute) or allowed_types(
            property_schema(self._parameters, key), self._parameters
        )
        self._num_values += 1
        self._state = _TagState.VALUE_BEGINS
        return f"{'{' if self._num_values == 1 else ', '}{quoted(key)}: "

    def _value_begins(self) -> str:
        before = self._tags.before_value
        if self._pending.startswith(before) or not before.startswith(self._pending):
            self._pending = self._pending.removeprefix(before)
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
            ended = self._ends(self._tags.close)
            string.feed("".join(self._collected[num_collected:]))
            if self._num_tags_in_strings and not string.may_be_json:
                string = self._read_again(self._tags.close if ended else "")
            elif not ended:
                return ""
            elif string.is_open:
                self._num_tags_in_strings += 1
                self._collected.append(self._tags.close)
            else:
                self._state = _TagState.BETWEEN
                return to_json(self._take_collected().removesuffix(self._tags.after_value), self._types)

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
        if not self._ends(self._tags.close, self._tags.after_value):
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
    """The types that `$is_string` allows. Empty: it is not there."""
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
