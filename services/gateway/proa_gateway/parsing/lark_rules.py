"""LarkRules: collects the rules and terminals of one grammar."""

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
        first, token_id = split(end, self.added_tokens)[0]
        if token_id is not None:
            # Only the token ends it, so of any text, whitespace before it need not be demanded.
            body = text if text == ANY else f"({text}) {quote(whitespace)}"
            return f"{self.terminal(body)} {self.literal(end)}"
        ended = f"({text}) {quote(whitespace + first)}"
        terminal = self.terminal(f"({ended}) & ~({ANY} {quote(first)} /(?s:.+)/)")
        rest = end.removeprefix(first)
        return f"{self.rule(terminal, '[lazy]')} {self.literal(rest)}" if rest else self.rule(terminal, "[lazy]")
