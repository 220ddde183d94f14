"""CompiledFormat: a tool format for one tokenizer, as the states of a parser."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from proa_gateway.parsing.call_template import call_header, call_template, pieces
from proa_gateway.parsing.format import Channels, Envelope, ObjectLiteral, Tagged, ToolFormat
from proa_gateway.parsing.terminals import Action, Terminal, Terminals


class State(Enum):
    START = auto()  # content of which nothing but whitespace has come
    CONTENT = auto()
    REASONING = auto()
    HEADER = auto()  # of a message in a channel
    CALL = auto()
    BETWEEN = auto()  # in a section, or after a call


@dataclass(frozen=True, slots=True)
class CompiledFormat:
    """`markers`: the tokens that the parser is to be given as ids, with their texts.
    `text_markers`: those of them that the parser reads as text.
    `implicit_call`: opens a call that has no opening; None in formats whose calls have one.
    """

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
        self._added = {token: id for token, id in self._all_added.items() if token not in tool_format.text_tokens}
        self._calls = (
            calls and tool_format.channels is None
        )  # in channels, the header of a message shows whether it is a call
        self._template = call_template(tool_format, self._added)

    def compile(self) -> CompiledFormat:
        implicit = None
        if self._calls and not self._template.opening:
            implicit = Terminal(Action.OPEN_CALL, "", header=call_header(self._format, (), self._added))
        terminals = {state: Terminals(each, self._added) for state, each in self._terminals().items()}
        texts = [text for text in self._texts() if text]
        markers = {id: token for token, id in self._all_added.items() if any(token in text for text in texts)}
        text_markers = frozenset(markers).difference(*(each.by_id for each in terminals.values()))
        return CompiledFormat(self._format, terminals, markers, text_markers, implicit)

    def _terminals(self) -> dict[State, list[Terminal]]:
        open_reasoning = self._each(Action.OPEN_REASONING, self._format.reasoning, 0)
        close_reasoning = self._each(Action.CLOSE_REASONING, self._format.reasoning, 1)
        late = _dropped(close_reasoning) + [Terminal(Action.DROP, text) for text in self._format.dropped]
        opens, anywhere = self._opens(), self._opens(anywhere=True)
        closes, between = self._closes(), self._between()
        channels = self._channels(self._format.channels)
        return {
            State.START: open_reasoning + opens + late + channels,
            State.CONTENT: self._tokens(open_reasoning) + anywhere + late + channels,
            State.REASONING: close_reasoning + self._tokens(_dropped(open_reasoning)) + anywhere + channels,
            State.HEADER: channels,
            State.CALL: closes + self._sections() + self._tokens(opens) + channels,
            State.BETWEEN: opens + self._sections() + between + open_reasoning + late + channels,
        }

    def _opens(self, *, anywhere: bool = False) -> list[Terminal]:
        """What begins a section or a call. `anywhere`: only what does so in the middle of a text."""
        if not self._calls:
            return []
        found = [self._opens_call(pieces(text, self._added)) for text in self._format.also_opens]
        if anywhere and self._format.at_start:
            return found
        if self._template.opening:
            found.append(self._opens_call(self._template.opening))
        return self._each(Action.OPEN_SECTION, self._format.section, 0) + found

    def _opens_call(self, opening: tuple[str, ...]) -> Terminal:
        return Terminal(Action.OPEN_CALL, opening[0], header=call_header(self._format, opening[1:], self._added))

    def _closes(self) -> list[Terminal]:
        if not self._calls:
            return []
        header = self._format.call.partition("$arguments")[0]
        return [Terminal(Action.CLOSE_CALL, text) for text in self._template.closing if text not in header]

    def _sections(self) -> list[Terminal]:
        return self._each(Action.CLOSE_SECTION, self._format.section, 1) if self._calls else []

    def _between(self) -> list[Terminal]:
        if not self._calls:
            return []
        texts = [*pieces(self._format.between, self._added), *self._template.closing]
        if isinstance(self._format.arguments, Envelope):
            texts.append("}")  # models close braces once too often
        return [Terminal(Action.DROP, text) for text in texts]

    def _channels(self, channels: Channels | None) -> list[Terminal]:
        if channels is None:
            return []
        following, *sender = pieces(channels.next, self._added)
        return [
            Terminal(Action.OPEN_CHANNEL, channels.open),
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
                    texts.append(template)
                case ObjectLiteral(quote):
                    texts.append(quote)
        return texts


def _dropped(terminals: Iterable[Terminal]) -> list[Terminal]:
    return [replace(terminal, action=Action.DROP) for terminal in terminals]
