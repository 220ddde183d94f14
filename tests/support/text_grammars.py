"""Grammars of custom tools' inputs, and whether a text is such an input, decided without them."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from proa_gateway.parsing.format import TextGrammar

# The rules that Codex sends for its tool `apply_patch`.
_PATCH_RULES = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
# And for its tool `exec`.
_EXEC_RULES = r"""
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE

PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
_QUOTES = r"""^(?:"[^"\r]*"|'(?:[^'\\]|\\.)*'|\\[a-zü\n]+|[0-9]{2,3}\t)+$"""


@dataclass(frozen=True, slots=True)
class TextCase:
    """`is_input`: an independent reader. `exits`: texts that lead to the end of an input."""

    name: str
    grammar: TextGrammar
    is_input: Callable[[str], bool]
    example: str
    exits: tuple[str, ...]


_LINES = {
    "B": r"\*\*\* Begin Patch",
    "A": r"\*\*\* Add File: .+",
    "D": r"\*\*\* Delete File: .+",
    "U": r"\*\*\* Update File: .+",
    "M": r"\*\*\* Move to: .+",
    "E": r"\*\*\* End of File",
    "Z": r"\*\*\* End Patch",
    "@": "@@(?: .+)?",
    "+": r"\+.*",
    "-": "[- ].*",
}


def _is_patch(text: str) -> bool:
    """By the kinds of its lines."""
    lines = text.removesuffix("\n").split("\n")
    kinds = [kind for line in lines for kind, pattern in _LINES.items() if re.fullmatch(pattern, line)]
    return len(kinds) == len(lines) and re.fullmatch(r"B(?:A\++|D|UM?(?:[-+@]+E?)?)+Z", "".join(kinds)) is not None


def _is_quotes(text: str) -> bool:
    return re.fullmatch(_QUOTES, text) is not None


PATCH = TextCase(
    "patch",
    TextGrammar("lark", _PATCH_RULES),
    _is_patch,
    '*** Begin Patch\n*** Update File: a "b".py\n*** Move to: ü\n@@ x\n-\\n\n+\t"q"\n*** End Patch\n',
    ("\n", "\n*** End Patch", "*** End Patch", "*** Delete File: a\n"),
)
EXEC = TextCase("exec", TextGrammar("lark", _EXEC_RULES), bool, ' // @exec: {"a": 1}\r\ntext("\\n");\n', ("\n",))
QUOTES = TextCase("quotes", TextGrammar("regex", _QUOTES), _is_quotes, "\"a\n\"'\\''\\ü\n12\t", ('"', "'", "1\t"))
TEXT_CASES = [PATCH, EXEC, QUOTES]
