"""CompiledFormat: a tool format for one tokenizer, as the states of a parser and what moves it from one to another."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from proa_gateway.parsing.format import (
    PLACE,
    CallObject,
    CallTexts,
    Channels,
    NamedIds,
    ObjectLiteral,
    PythonCall,
    Tagged,
    ToolFormat,
)
from proa_gateway.parsing.tag_tokens import tag_tokens

_MAX_RECIPIENT = 256  # characters
_NAME = r"(?P<name>[^\n]+?)"
_IDENTIFIER = r"(?P<name>[^\W\d][\w.\-]*)"
_IDENTIFIER_BEGINS = re.compile(r"\s*(?:[^\W\d][\w.\-]*)?\s*")


@dataclass(frozen=True, slots=True)
class Header:
    """The text between the token that opens a call and the call's arguments.

    `whole` has the group `name`, and `id` if the model writes one. `begins` matches any text that may still become a
    header; None if the format's opening makes it certain enough to wait for the end.
    """

    whole: re.Pattern[str]
    begins: re.Pattern[str] | None


def pieces(text: str, added_tokens: Collection[str]) -> tuple[str, ...]:
    """Split a text at tokens, which are pieces, and at line ends. Pieces have no whitespace around them."""
    tokens = sorted((token for token in added_tokens if token.strip() and token in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})|\n" if tokens else "\n", text)
    return tuple(part.strip() for part in parts if part and part.strip())


def call_header(tool_format: ToolFormat, opening: Iterable[str], added_tokens: Collection[str]) -> Header | None:
    """Return the pattern of a call's header, between the opening `opening` and the arguments. None if the format is a
    `CallObject`, whose reader takes the function's name from the JSON object."""
    if isinstance(tool_format.arguments, CallObject):
        return None
    call = tool_format.call_in_body
    header = call[call.index("$") : call.index("$arguments")]
    before, optional, after = header.partition(tool_format.optional) if tool_format.optional else (header, "", "")
    whole = [_spaced(opening), _pattern(tool_format, before, added_tokens)]
    if optional:
        whole.append(f"(?:{_pattern(tool_format, optional, added_tokens)})?")
    whole.append(_pattern(tool_format, after, added_tokens))
    if not PLACE.split(header)[-1].strip():
        whole.append(f"(?={'|'.join(map(re.escape, _ends(tool_format, added_tokens)))})")
    is_identifier = isinstance(tool_format.arguments, PythonCall)
    return Header(re.compile("".join(whole)), _IDENTIFIER_BEGINS if is_identifier else None)


def _pattern(tool_format: ToolFormat, text: str, added_tokens: Collection[str]) -> str:
    """Matches a part of a call, with whitespace around its pieces."""
    parts = PLACE.split(text)  # texts and places in turn
    patterns = [_spaced(pieces(parts[0], added_tokens))] if parts[0] else []
    for place, after in zip(parts[1::2], parts[2::2], strict=True):
        patterns += [_place(tool_format, place), _spaced(pieces(after, added_tokens))]
    return "".join(patterns)


def _place(tool_format: ToolFormat, place: str) -> str:
    if place == "name":
        return _IDENTIFIER if isinstance(tool_format.arguments, PythonCall) else _NAME
    if place == "index":
        return "[0-9]+"
    if isinstance(tool_format.call_ids, NamedIds) and "$name" not in tool_format.call:
        template = re.escape(tool_format.call_ids.template)
        return f"(?P<id>{template.replace(re.escape('$name'), _NAME).replace(re.escape('$index'), '[0-9]+')})"
    return r"(?P<id>[^\n]+?)"


def _spaced(texts: Iterable[str]) -> str:
    return "".join(rf"\s*{re.escape(text)}" for text in texts) + r"\s*"


def _ends(tool_format: ToolFormat, added_tokens: Collection[str]) -> tuple[str, ...]:
    """Return the texts that may end a name with nothing of its own after it: the arguments' first piece, or the call's
    closing."""
    closing = pieces(CallTexts.of(tool_format).closing, added_tokens)[:1]
    if isinstance(tool_format.arguments, Tagged):
        before_key = tool_format.arguments.template.partition("$key")[0]
        return (*pieces(before_key, added_tokens)[:1], *closing)
    return ("{", *closing)


class Action(Enum):
    OPEN_REASONING = auto()
    CLOSE_REASONING = auto()
    OPEN_SECTION = auto()
    CLOSE_SECTION = auto()
    OPEN_CALL = auto()
    CLOSE_CALL = auto()
    OPEN_MESSAGE = auto()
    OPEN_CHANNEL = auto()
    OPEN_BODY = auto()
    DROP = auto()


@dataclass(frozen=True, slots=True)
class Terminal:
    """`text`: the token, or the text that is looked for. `rest`: text that follows it and belongs to it.
    `header`: of an OPEN_CALL, unless the call is an envelope."""

    action: Action
    text: str
    rest: str = ""
    header: Header | None = None


class Terminals:
    """The terminals of one state. Those that are added tokens are found by id only, the others as text only.

    Whitespace at a text's end is not certain in a state that can be left, since it is dropped there.
    """

    __slots__ = ("_bare", "_by_text", "_first", "_holds_space", "_longest", "_special", "_texts", "by_id")

    def __init__(self, terminals: Iterable[Terminal], added_tokens: Mapping[str, int], bare: str = "") -> None:
        """Of several terminals with the same text, the first counts. `bare`: what a header begins with in a body."""
        by_text: dict[str, Terminal] = {}
        for terminal in terminals:
            by_text.setdefault(terminal.text, terminal)
        self._holds_space = any(terminal.action is not Action.DROP for terminal in by_text.values())
        self.by_id = {added_tokens[text]: by_text.pop(text) for text in list(by_text) if text in added_tokens}
        self._by_text = by_text
        self._longest = max(map(len, by_text), default=0)  # characters
        self._texts = _any_of(sorted(by_text, key=len, reverse=True))
        first = sorted({text[0] for text in by_text})
        self._first = _any_of(first)  # the texts' first characters
        self._bare = _beginning_of(bare)
        self._special = _any_of(first, *[r"\s\Z"] * self._holds_space, *[self._bare.pattern] * bool(bare))

    def is_certain(self, text: str) -> bool:
        """Whether there is no terminal in the text, no part of one, and no space at its end: the common case."""
        return not self._special.search(text)

    def split(self, text: str) -> tuple[str, Terminal | None, str]:
        """The text before the first terminal, the terminal, and the text after it. Without a terminal: the text that
        stays what it is whatever follows, and the rest."""
        if found := self.search(text):
            start, terminal = found
            return text[:start], terminal, text[start + len(terminal.text) :]
        end = self._num_certain(text)
        return text[:end], None, text[end:]

    def search(self, text: str) -> tuple[int, Terminal] | None:
        """The first terminal in the text, and where it begins."""
        found = self._texts.search(text)
        return (found.start(), self._by_text[found[0]]) if found else None

    def match(self, text: str) -> Terminal | None:
        """The terminal at the text's start."""
        found = self._texts.match(text)
        return self._by_text[found[0]] if found else None

    def begin_with(self, text: str) -> bool:
        """Whether more text may make it a terminal."""
        return any(terminal.startswith(text) for terminal in self._by_text)

    def _num_certain(self, text: str) -> int:
        end = len(text)
        for found in self._first.finditer(text, max(0, end - self._longest + 1)):
            if self.begin_with(text[found.start() :]):
                end = found.start()
                break
        if bare := self._bare.search(text, max(0, len(text) - 2 * _MAX_RECIPIENT)):
            end = min(end, bare.start())
        return len(text[:end].rstrip()) if self._holds_space else end


def _beginning_of(bare: str) -> re.Pattern[str]:
    """Matches what may become a header in a body: whitespace and a part of `bare`, or also of the recipient."""
    parts = [rf"{re.escape(bare)}[^\s<]{{0,{_MAX_RECIPIENT}}}", *(re.escape(bare[:end]) for end in range(1, len(bare)))]
    return re.compile(rf"\s(?:{'|'.join(parts)})\Z" if bare else r"(?!)")


def _any_of(texts: Iterable[str], *patterns: str) -> re.Pattern[str]:
    """Matches one of the texts or patterns; without any, nothing."""
    return re.compile("|".join([*map(re.escape, texts), *patterns]) or r"(?!)")


class State(Enum):
    START = auto()  # content of which nothing but whitespace has come
    CONTENT = auto()
    REASONING = auto()
    HEADER = auto()  # of a message in a channel
    CALL = auto()
    BETWEEN = auto()  # in a section, or after a call


@dataclass(frozen=True, slots=True)
class CompiledFormat:
    """`markers`: the tokens that the parser gets as ids, with their texts. `text_markers`: markers that the parser
    reads as text. `implicit_call`: opens a call that has no opening; None in formats whose calls have one."""

    tool_format: ToolFormat
    terminals: Mapping[State, Terminals]
    markers: Mapping[int, str]
    text_markers: frozenset[int]
    implicit_call: Terminal | None

    @property
    def begins_with_call(self) -> bool:
        """Whether content may begin with a call without anything to open it."""
        return self.implicit_call is not None and self.tool_format.section is None


def compile_format(tool_format: ToolFormat, added_tokens: Mapping[str, int], *, calls: bool) -> CompiledFormat:
    """Compile a format for a tokenizer with these added tokens. Without `calls`, what looks like a call is content."""
    return _Compiler(tool_format, added_tokens, calls).compile()


class _Compiler:
    def __init__(self, tool_format: ToolFormat, added_tokens: Mapping[str, int], calls: bool) -> None:
        self._format = tool_format
        self._all_added = {token: id for token, id in added_tokens.items() if token}
        self._added = tag_tokens(tool_format, added_tokens)  # tokens that the parser finds by their ids
        self._calls = calls and not tool_format.is_named_in_header  # calls are found by their own texts
        call = CallTexts.of(tool_format)
        self._opening, self._closing = (pieces(text, self._added) for text in (call.opening, call.closing))

    def compile(self) -> CompiledFormat:
        implicit = None
        if self._calls and not self._opening:
            implicit = Terminal(Action.OPEN_CALL, "", header=call_header(self._format, (), self._added))
        bare = self._format.channels.bare if self._format.channels else ""
        terminals = {state: Terminals(each, self._added, bare) for state, each in self._terminals().items()}
        texts = [text for text in self._texts() if text]
        markers = {id: token for token, id in self._all_added.items() if any(token in text for text in texts)}
        text_markers = frozenset(markers).difference(*(each.by_id for each in terminals.values()))
        return CompiledFormat(self._format, terminals, markers, text_markers, implicit)

    def _terminals(self) -> dict[State, list[Terminal]]:
        open_reasoning = self._each(Action.OPEN_REASONING, self._format.reasoning, 0)
        close_reasoning = self._each(Action.CLOSE_REASONING, self._format.reasoning, 1)
        late = _dropped(close_reasoning) + [Terminal(Action.DROP, text) for text in self._format.dropped]
        opens = self._opens()
        closes, between = self._closes(), self._between()
        channels = self._channels(self._format.channels)
        # In channels, the header of a message shows whether it is a call.
        at_start, anywhere = ([], []) if channels else (opens, self._opens(anywhere=True))
        return {
            State.START: open_reasoning + at_start + late + channels,
            State.CONTENT: self._tokens(open_reasoning) + anywhere + late + channels,
            State.REASONING: close_reasoning + self._tokens(_dropped(open_reasoning)) + anywhere + channels,
            State.HEADER: channels,
            State.CALL: closes + self._sections() + self._tokens(opens) + channels,
            State.BETWEEN: opens + self._sections() + between + open_reasoning + late + channels,
        }

    def _opens(self, *, anywhere: bool = False) -> list[Terminal]:
        """Return the terminals that begin a section or a call. `anywhere`: only those that do so in the middle of a
        text."""
        if not self._calls:
            return []
        found = [self._opens_call(pieces(text, self._added)) for text in self._format.also_opens]
        if anywhere and self._format.at_start:
            return found
        if self._opening:
            found.append(self._opens_call(self._opening))
        return self._each(Action.OPEN_SECTION, self._format.section, 0) + found

    def _opens_call(self, opening: tuple[str, ...]) -> Terminal:
        return Terminal(Action.OPEN_CALL, opening[0], header=call_header(self._format, opening[1:], self._added))

    def _closes(self) -> list[Terminal]:
        if not self._calls:
            return []
        header = self._format.call_in_body.partition("$arguments")[0]
        return [Terminal(Action.CLOSE_CALL, text) for text in self._closing if text not in header]

    def _sections(self) -> list[Terminal]:
        return self._each(Action.CLOSE_SECTION, self._format.section, 1) if self._calls else []

    def _between(self) -> list[Terminal]:
        if not self._calls:
            return []
        between = "" if self._format.channels else self._format.between  # which ends one message and begins another
        texts = [*pieces(between, self._added), *self._closing]
        if isinstance(self._format.arguments, CallObject):
            texts.append("}")  # models close braces once too often
        return [Terminal(Action.DROP, text) for text in texts]

    def _channels(self, channels: Channels | None) -> list[Terminal]:
        if channels is None:
            return []
        following, *sender = pieces(channels.next, self._added)
        return [
            *([Terminal(Action.OPEN_CHANNEL, channels.open)] if channels.open else []),
            Terminal(Action.OPEN_BODY, channels.body),
            *(Terminal(Action.OPEN_MESSAGE, text) for text in channels.close),
            Terminal(Action.OPEN_MESSAGE, following, "".join(sender)),
        ]

    def _each(self, action: Action, pair: tuple[str, str] | None, side: int) -> list[Terminal]:
        if pair is None or not (found := pieces(pair[side], self._added)):
            return []
        return [Terminal(action, found[0], "".join(found[1:]))]

    def _tokens(self, terminals: Iterable[Terminal]) -> list[Terminal]:
        return [terminal for terminal in terminals if terminal.text in self._added]

    def _texts(self) -> list[str]:
        """All texts of the format that the parser looks for."""
        form, channels = self._format, self._format.channels
        texts = [*(form.reasoning or ()), *form.dropped]
        if channels:
            texts += [channels.open, channels.body, *channels.close, channels.next, form.call]
        if self._calls:
            texts += [form.call, form.between, *(form.section or ()), *form.also_opens]
            match form.arguments:
                case Tagged(template):
                    texts += [template, *(form.arguments.quotes or ())]
                case ObjectLiteral(quote):
                    texts.append(quote)
        return texts


def _dropped(terminals: Iterable[Terminal]) -> list[Terminal]:
    return [replace(terminal, action=Action.DROP) for terminal in terminals]
