"""CallsGrammar: the calls of a message, as a format writes them."""

import json
import re
from collections.abc import Sequence

from proa.grammar.lark import AddedTokens, quote, split
from proa_gateway.parsing.arguments_grammar import arguments_rules
from proa_gateway.parsing.format import Envelope, NamedIds, ToolFormat
from proa_gateway.parsing.lark_rules import ANY, LarkRules
from proa_gateway.parsing.tool import FunctionTool

_PLACE = re.compile(r"(\$(?:name|id|arguments))")
_NUMBER = "/[0-9]{1,3}/"


class CallsGrammar:
    """`rules`: all that the expressions need. `opening_token`: what each call, or the list of them, begins with, if it
    is one token that stands nowhere else."""

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[FunctionTool], added_tokens: AddedTokens, *, parallel: bool
    ) -> None:
        """`parallel`: several calls are allowed. Raises `GrammarError` as `arguments_rules` does."""
        self.rules = LarkRules(added_tokens)
        self._format = tool_format
        self._parallel = parallel and tool_format.channels is None  # there, a call ends the output
        self._arguments: list[tuple[FunctionTool, str]] = []
        for index, tool in enumerate(tools):
            expression, lines = arguments_rules(tool_format.arguments, tool, added_tokens, f"tool_{index}_")
            self.rules.lines += lines
            self._arguments.append((tool, expression))
        self._opening, token_id = self._find_opening()
        self.opening_token = None if tool_format.at_start else token_id

    def calls(self) -> str:
        return self._calls("")

    def after_opening(self) -> str:
        """The calls that one `opening_token` begins, without it."""
        return self._calls(self._opening) if self._format.section else self._call(self._opening)

    def calls_or_text(self) -> str:
        """Text in which each opening of a call begins one that matches its schema."""
        if self._format.at_start:
            # Without ANY, bytes that are not UTF-8 may follow, so the terminal never ends for llguidance's lexer.
            text = self.rules.terminal(rf"{ANY} & ~(/\s*/ {quote(self._opening[0])} {ANY})")
            return f"{text} | {self.calls()}"
        to_opening = f"{self.rules.text_until(self._opening)} {self.after_opening()}"
        text = self.rules.free_text()
        return f"({to_opening})* {text}" if self._parallel else f"{text} | {to_opening}"

    def _find_opening(self) -> tuple[str, int | None]:
        """What a call begins with, at least a token or a line, and its id if it is a token."""
        opening, _ = self._format.section or (_PLACE.split(self._format.call)[0], "")
        piece, token_id = split(opening.lstrip(), self.rules.added_tokens)[0]
        return (piece if token_id is not None else piece.partition("\n")[0].rstrip() or piece), token_id

    def _calls(self, skipped: str) -> str:
        opening, closing = self._format.section or ("", "")
        call = self._call("" if self._format.section else skipped)
        more = f"({self.rules.literal(self._format.between)} {call})*" if self._parallel else ""
        return f"{self._literal(opening.removeprefix(skipped))} {call} {more} {self._literal(closing)}"

    def _call(self, skipped: str) -> str:
        calls = [self._call_of(tool, arguments, skipped) for tool, arguments in self._arguments]
        return self.rules.rule(" | ".join(calls))

    def _call_of(self, tool: FunctionTool, arguments: str, skipped: str) -> str:
        name = tool.name
        if isinstance(self._format.arguments, Envelope):
            name = json.dumps(name, ensure_ascii=False)[1:-1]
        call = self._format.call.removeprefix(skipped).replace(self._format.optional, "")
        if isinstance(ids := self._format.call_ids, NamedIds):
            call = call.replace("$id", ids.template)
            an_id = ""
        else:
            an_id = f"/[{re.escape(ids.alphabet)}]{{{ids.length}}}/"
        places = {"$arguments": arguments, "$id": an_id, "$index": _NUMBER}
        parts = re.split(r"(\$(?:arguments|id|index))", call.replace("$name", name))
        return " ".join(filter(None, (places[part] if part in places else self._literal(part) for part in parts)))

    def _literal(self, text: str) -> str:
        return self.rules.literal(text) if text else ""
