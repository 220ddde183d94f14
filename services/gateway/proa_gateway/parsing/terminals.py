"""Terminals: the tokens and texts that move the parser from one state to another."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from proa_gateway.parsing.call_template import Header


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

    __slots__ = ("_by_text", "_first", "_holds_space", "_longest", "_special", "_texts", "by_id")

    def __init__(self, terminals: Iterable[Terminal], added_tokens: Mapping[str, int]) -> None:
        """Of several terminals with the same text, the first counts."""
        by_text: dict[str, Terminal] = {}
        for terminal in terminals:
            by_text.setdefault(terminal.text, terminal)
        self._holds_space = any(terminal.action is not Action.DROP for terminal in by_text.values())
        self.by_id = {added_tokens[text]: by_text.pop(text) for text in list(by_text) if text in added_tokens}
        self._by_text = by_text
        self._longest = max(map(len, by_text), default=0)
        self._texts = _any_of(sorted(by_text, key=len, reverse=True))
        first = sorted({text[0] for text in by_text})
        self._first = _any_of(first)
        self._special = _any_of(first, *[r"\s\Z"] * self._holds_space)

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
        return len(text[:end].rstrip()) if self._holds_space else end


def _any_of(texts: Iterable[str], *patterns: str) -> re.Pattern[str]:
    """Matches one of the texts or patterns; without any, nothing."""
    return re.compile("|".join([*map(re.escape, texts), *patterns]) or r"(?!)")
