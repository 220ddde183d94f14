"""LarkRules: collects the rules and terminals of one grammar."""

from collections.abc import Callable
from itertools import takewhile

from proa.grammar.lark import AddedTokens, literal, quote, split

ANY = "/(?s:.*)/"  # text


class LarkRules:
    """`prefix`: of all names, so that the rules of several collections can stand in one grammar."""

    def __init__(self, added_tokens: AddedTokens, prefix: str = "") -> None:
        self.added_tokens = added_tokens
        self._prefix = prefix
        self.lines: list[str] = []

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule. Returns its name."""
        name = f"{self._prefix}rule_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def named_rule(self, name: str, body: Callable[[str], str]) -> str:
        """Add a rule that may name itself, once. `body`: called with its full name."""
        full_name = f"{self._prefix}{name}"
        if not any(line.startswith(f"{full_name}: ") for line in self.lines):
            self.lines.append(f"{full_name}: {body(full_name)}")
        return full_name

    def terminal(self, body: str) -> str:
        name = f"{self._prefix.upper()}TERMINAL_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        return literal(text, self.added_tokens)

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.lines, ""])

    def free_text(self) -> str:
        """Any text, also none; no special token."""
        return self.terminal(ANY)

    def text_until(self, end: str, text: str = ANY, whitespace: str = "") -> str:
        """A text that matches the terminal expression `text`, and `end`, which it does not contain.

        `whitespace`: stands before `end`, and is not part of the text.
        """
        pieces = split(end, self.added_tokens)
        first = "".join(piece for piece, _ in takewhile(lambda piece: piece[1] is None, pieces))
        if len(pieces) > 1 or not first:
            # Only the token ends it, so of any text, whitespace before it need not be demanded.
            whole = f"{ANY} {quote(first)}" if text == ANY else f"({text}) {quote(whitespace + first)}"
            return f"{self.terminal(whole)} {self.literal(end.removeprefix(first))}"
        ended = f"({text}) {quote(whitespace + first)}"
        terminal = self.terminal(f"({ended}) & ~({ANY} {quote(first)} /(?s:.+)/)")
        return self.rule(terminal, "[lazy]")
