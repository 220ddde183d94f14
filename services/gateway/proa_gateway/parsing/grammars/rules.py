"""Rules and terminals of one grammar: its collection, JSON values, and strings that are written without quotes."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import takewhile

from proa.grammar import GrammarError
from proa.grammar.json_schema import JsonOptions, json_expression
from proa.grammar.lark import AddedTokens, literal, quote, regex, split
from proa.grammar.schema_bounds import Findings
from proa_gateway.parsing.schema_types import WORDS, Schema, allowed_types, resolve

ANY = "/(?s:.*)/"  # text
_DATE = r"(?:19|20)[0-9]{2}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+\-](?:0[0-9]|1[0-4]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HOST = r"[a-z0-9]{1,20}(?:-[a-z0-9]{1,20})?(?:\.[a-z0-9]{1,20}(?:-[a-z0-9]{1,20})?){0,4}"
# Each matches usual values of the format, not all of them, and nothing else.
_FORMATS = {
    "date": f"{_DATE}",
    "time": f"{_TIME}",
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_]{{1,30}}(?:[.+\-][A-Za-z0-9_]{{1,30}}){{0,4}}@{_HOST}\.[a-z]{{2,10}}",
    "uri": rf"https?://{_HOST}(?::[0-9]{{2,4}})?(?:/[A-Za-z0-9._~\-]{{0,60}}){{0,9}}(?:\?[A-Za-z0-9=&._~\-]{{0,200}})?",
}
_KNOWN = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"}
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}


class LarkRules:
    """`prefix`: of all names, so that the rules of several collections can stand in one grammar."""

    def __init__(self, added_tokens: AddedTokens, prefix: str = "") -> None:
        self.added_tokens = added_tokens
        self.prefix = prefix
        self.lines: list[str] = []  # a rule or a terminal each

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule. Returns its name."""
        name = f"{self.prefix}rule_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def named_rule(self, name: str, body: Callable[[str], str]) -> str:
        """Add a rule that may name itself, once. `body`: called with its full name."""
        full_name = f"{self.prefix}{name}"
        if not any(line.startswith(f"{full_name}: ") for line in self.lines):
            self.lines.append(f"{full_name}: {body(full_name)}")
        return full_name

    def terminal(self, body: str) -> str:
        name = f"{self.prefix.upper()}TERMINAL_{len(self.lines)}"
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


class JsonRules(LarkRules):
    """`strict`: raise `GrammarError` for what of a schema cannot be held exactly; else add warnings to `findings`.
    Schemas are those that `supported_schema` returned."""

    def __init__(self, added_tokens: AddedTokens, prefix: str, findings: Findings, *, strict: bool) -> None:
        super().__init__(added_tokens, prefix)
        self.strict = strict
        self._findings = findings

    def leave_out(self, path: str, error: GrammarError) -> None:
        """Warn of what is not held at `path`. Raises `error` if `strict`."""
        if self.strict:
            raise error
        self._findings.warn(f"{path}: {error}, so it is not enforced")

    def json(self, schema: Schema) -> str:
        return self.rule(json_expression(schema, JsonOptions(strict=self.strict), self._findings))


def text_terminal(schema: Schema, root: Schema, *, strict: bool) -> str:
    """A terminal expression for a value that is a string, or one of the words null, true and false, as the schema
    allows. `root`: the schema that `$ref` is in. Raises `GrammarError`."""
    alternatives = [_string(part, strict) for part in _parts(resolve(schema, root), root)]
    words = [word for word, type_ in WORDS.items() if type_ in allowed_types(schema, root)]
    if ANY in alternatives:
        return ANY
    if words and isinstance(values := schema.get("enum"), list):
        words = [word for word in words if json.loads(word) in values]
    return " | ".join([*alternatives, *map(quote, words)])


def _parts(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The parts of a union that are strings."""
    parts = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(parts, list):
        yield schema
        return
    for keyword in schema:
        if keyword not in {"anyOf", "oneOf", "type", *ANNOTATIONS}:
            raise GrammarError(f"{keyword} beside a union is not supported in this format of tool calls")
    for part in (resolve(part, root) for part in parts):
        if "string" in allowed_types(part, root):
            yield from _parts(part, root)
        elif not part.keys() <= {"type", *ANNOTATIONS}:
            raise GrammarError("a union of strings and constants is not supported in this format of tool calls")


def _string(schema: Schema, strict: bool) -> str:
    for keyword in schema:
        if keyword not in _KNOWN | ANNOTATIONS:
            raise GrammarError(f"{keyword} is not supported for a string in this format of tool calls")
    return " & ".join([*_values(schema), *_lengths(schema), *_patterns(schema, strict)]) or ANY


def _values(schema: Schema) -> list[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is None:
        return []
    strings = [quote(value) for value in values if isinstance(value, str)] if isinstance(values, list) else []
    if not strings:
        raise GrammarError("enum has no string")
    return [f"({' | '.join(strings)})"]


def _lengths(schema: Schema) -> list[str]:
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if not all(isinstance(length, int) for length in (low, high or 0)):
        raise GrammarError("minLength and maxLength must be numbers")
    return [f"/(?s:.{{{low},{high}}})/"] if low or high != "" else []


def _patterns(schema: Schema, strict: bool) -> list[str]:
    patterns = []
    if isinstance(pattern := schema.get("pattern"), str):
        patterns.append(regex(_whole(pattern)))
    if isinstance(name := schema.get("format"), str):
        if strict and name not in _FORMATS:
            raise GrammarError(f"format {name[:50]!r} is not supported in this format of tool calls")
        patterns += [regex(_FORMATS[name])] if name in _FORMATS else []
    return patterns


def _whole(pattern: str) -> str:
    """A schema's pattern may match anywhere in the value; as a regular expression for all of the value."""
    body = pattern.removeprefix("^")
    is_anchored = body.endswith("$") and not re.search(r"(?<!\\)(?:\\\\)*\\\$$", body)
    before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if is_anchored else "(?s:.*)"
    return f"{before}(?:{body.removesuffix('$') if is_anchored else body}){after}"
