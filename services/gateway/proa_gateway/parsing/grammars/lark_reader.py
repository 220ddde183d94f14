"""read_lark: a grammar in Lark as patterns by name.

The reader is our own. The library `lark` would read more than llguidance can hold, and its lexer takes exponential time
for a regular expression that does not end: 1.1 s for 30 backslashes, twice as long for each two more (lark 1.3.1).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from proa.grammar import GrammarError
from proa_gateway.parsing.grammars.patterns import (
    Characters,
    Literal,
    Named,
    OneOf,
    Pattern,
    Repeated,
    Series,
    Token,
    of_regex,
    of_text,
    walk,
)

START = "start"
MAX_RULES = 300  # their names in a row are so many calls, here and in llguidance
MAX_LEVELS = 50  # of parentheses
MAX_TIMES = 10_000  # of a repetition
_IGNORED = "%ignore"
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": r"[+\-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+\-]?(?:[0-9]+[eE][+\-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+\-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+\-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_TOKEN = re.compile(
    r"(?P<space>[ \t\r]+|(?://|\#)[^\n]*)|(?P<line>\n)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)'
    r"|(?P<name>[A-Za-z_]\w*)|(?P<directive>%[a-z]+)|(?P<number>-?[0-9]+)|(?P<sign>->|\.\.|[:|()\[\]{}?!*+~,.])"
    r"|(?P<special><[^<>\s]+>)",
    re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", **{c: c for c in "\"\\/'"}}


@dataclass(frozen=True, slots=True)
class _Lexed:
    kind: str  # a group of `_TOKEN`, or "end"
    text: str


def read_lark(text: str) -> Mapping[str, Pattern]:
    """The grammar's rules and terminals; it begins with `START`. Raises `GrammarError` for what it cannot read, and for
    what llguidance cannot hold within a call."""
    definitions = _Reader(_lex(text)).read()
    if START not in definitions:
        raise GrammarError('a grammar must be written in Lark, with a rule "start:"')
    return definitions


def _lex(text: str) -> list[_Lexed]:
    tokens: list[_Lexed] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise GrammarError(f"the grammar has a syntax error at {text[position : position + 30]!r}")
        position = found.end()
        if found.lastgroup == "special":
            raise GrammarError(f"special tokens, such as {found[0][:50]!r}, are not supported in a tool's grammar")
        if found.lastgroup != "space":
            tokens.append(_Lexed(found.lastgroup, found[0]))
    return tokens


class _Reader:
    def __init__(self, tokens: list[_Lexed]) -> None:
        self._tokens = [*tokens, _Lexed("end", "")]
        self._position = 0  # of the next token
        self._levels = 0  # brackets around what is read
        self._in_rule = False  # what is read belongs to a rule, not to a terminal
        self._definitions: dict[str, Pattern] = {}  # by name
        self._ignores = any(token.text == _IGNORED for token in tokens)  # the grammar has `%ignore`, maybe further on
        self._ignored: list[Pattern] = []  # what the directives `%ignore` name

    def read(self) -> Mapping[str, Pattern]:
        while (token := self._next()).kind != "end":
            match token.kind:
                case "line":
                    continue
                case "name":
                    self._definition(token.text)
                case "sign" if token.text in "?!" and self._peek("name"):
                    continue  # about the tree that is parsed
                case "directive" if token.text == "%import":
                    self._import()
                case "directive" if token.text == _IGNORED:
                    self._in_rule = False
                    self._ignored.append(self._alternatives())
                case "directive":
                    raise GrammarError(f"{token.text} is not supported in a tool's grammar")
                case _:
                    self._fail(token)
        terminals = [pattern for name, pattern in self._definitions.items() if name.isupper()]
        for part in (part for pattern in (*terminals, *self._ignored) for part in walk(pattern)):
            if isinstance(part, Named) and not part.name.isupper():
                raise GrammarError(f"the rule {part.name!r} cannot be a part of a terminal")
        if self._ignored:
            pieces = [Token(self._piece(pattern)) for pattern in self._ignored]
            self._definitions[_IGNORED] = Repeated(OneOf(tuple(pieces)), 0, None)
        return self._definitions

    def _piece(self, ignored: Pattern) -> Pattern:
        """One piece of what is ignored, which may be there any number of times anyway. A piece of one character ends
        there, so that llguidance's lexer cannot take what comes after the input for more of it."""
        for _ in range(MAX_RULES):
            if not isinstance(ignored, Named):
                break
            ignored = self._definitions.get(ignored.name, Literal(""))
        is_run = isinstance(ignored, Repeated) and ignored.low <= 1 and ignored.high is None
        return ignored.part if isinstance(ignored, Repeated) and is_run else ignored

    def _peek(self, kind: str, *texts: str) -> bool:
        token = self._tokens[self._position]
        return token.kind == kind and (not texts or token.text in texts)

    def _next(self) -> _Lexed:
        token = self._tokens[self._position]
        self._position = min(self._position + 1, len(self._tokens) - 1)
        return token

    def _take(self, kind: str, *texts: str) -> _Lexed | None:
        return self._next() if self._peek(kind, *texts) else None

    def _need(self, kind: str, *texts: str) -> _Lexed:
        return self._take(kind, *texts) or self._fail(self._tokens[self._position])

    def _fail(self, token: _Lexed) -> NoReturn:
        where = f"at {token.text[:30]!r}" if token.text.strip() else "where a line or the grammar ends"
        raise GrammarError(f"the grammar has a syntax error {where}")

    def _definition(self, name: str) -> None:
        if self._take("sign", "."):
            self._need("number")  # a priority, which matters for what is parsed only
        if self._peek("sign", "{"):
            raise GrammarError(f"templates, such as {name!r}, are not supported in a tool's grammar")
        if self._peek("sign", "["):
            raise GrammarError(
                f"attributes of a rule, such as those of {name!r}, are not supported in a tool's grammar"
            )
        self._need("sign", ":")
        self._in_rule = not name.isupper()
        self._define(name, self._alternatives())

    def _define(self, name: str, pattern: Pattern) -> None:
        if name in self._definitions:
            raise GrammarError(f"the grammar defines {name!r} twice")
        self._definitions[name] = pattern
        if len(self._definitions) > MAX_RULES:
            raise GrammarError(f"a tool's grammar must have at most {MAX_RULES} rules and terminals")

    def _import(self) -> None:
        library = self._need("name")
        if library.text != "common":
            raise GrammarError("only terminals of common can be imported")
        if self._take("sign", "."):
            name = self._need("name").text
            self._imported(name, self._need("name").text if self._take("sign", "->") else name)
            return
        self._need("sign", "(")
        while not self._take("sign", ")"):
            name = self._need("name").text
            self._imported(name, name)
            self._take("sign", ",")

    def _imported(self, name: str, own_name: str) -> None:
        if name not in _COMMON:
            raise GrammarError(f"common has no {name!r} here; there are {', '.join(sorted(_COMMON))}")
        self._define(own_name, of_regex(_COMMON[name]))

    def _alternatives(self) -> Pattern:
        parts = [self._series()]
        while self._continues():
            parts.append(self._series())
        return parts[0] if len(parts) == 1 else OneOf(tuple(parts))

    def _continues(self) -> bool:
        """Read the sign before another alternative, which may begin a line."""
        position = self._position
        while self._take("line"):
            pass
        if self._take("sign", "|"):
            return True
        self._position = position
        return False

    def _series(self) -> Pattern:
        parts: list[Pattern] = []
        while True:
            while self._levels and self._take("line"):
                pass
            if not (self._peek("name") or self._peek("string") or self._peek("regex") or self._peek("sign", "(", "[")):
                break
            parts.append(self._repeated(self._item()))
        if self._take("sign", "->"):
            self._need("name")  # an alias, which matters for what is parsed only
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _item(self) -> Pattern:
        token = self._next()
        match token.kind:
            case "string":
                return self._token(self._string(token.text))
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                return self._token(of_regex(body, flags))
            case "name":
                if self._peek("sign", "{") and self._tokens[self._position + 1].kind not in ("number", "sign"):
                    raise GrammarError(f"templates, such as {token.text!r}, are not supported in a tool's grammar")
                named = Named(token.text)
                return self._token(named) if token.text.isupper() else named
        return self._group(")" if token.text == "(" else "]")

    def _group(self, closing: str) -> Pattern:
        self._levels += 1
        if self._levels > MAX_LEVELS:
            raise GrammarError(f"parentheses of a tool's grammar must be nested at most {MAX_LEVELS} levels deep")
        inner = self._alternatives()
        while self._take("line"):
            pass
        self._need("sign", closing)
        self._levels -= 1
        return inner if closing == ")" else Repeated(inner, 0, 1)

    def _token(self, pattern: Pattern) -> Pattern:
        """In a rule, what is ignored may follow each token."""
        if not self._in_rule:
            return pattern
        return Series((Token(pattern), Named(_IGNORED))) if self._ignores else Token(pattern)

    def _string(self, text: str) -> Pattern:
        value = _unquoted(text)
        if not self._take("sign", ".."):
            return of_text(value, ignores_case=text.endswith("i"))
        last = _unquoted(self._need("string").text)
        if len(value) != 1 or len(last) != 1 or last < value:
            raise GrammarError(
                f"the range {value[:20]!r}..{last[:20]!r} must be between two characters, in their order"
            )
        return Characters(((ord(value), ord(last)),))

    def _repeated(self, pattern: Pattern) -> Pattern:
        if sign := self._take("sign", "?", "*", "+"):
            return Repeated(pattern, int(sign.text == "+"), 1 if sign.text == "?" else None)
        if self._take("sign", "~"):
            low = self._number()
            return self._times(pattern, low, self._number() if self._take("sign", "..") else low)
        if self._take("sign", "{"):
            low = self._number() if self._peek("number") else 0
            high: int | None = low
            if self._take("sign", ","):
                high = self._number() if self._peek("number") else None
            self._need("sign", "}")
            return self._times(pattern, low, high)
        return pattern

    def _number(self) -> int:
        return int(self._need("number").text[:10])

    def _times(self, pattern: Pattern, low: int, high: int | None) -> Pattern:
        if not 0 <= low <= (low if high is None else high) <= MAX_TIMES:
            raise GrammarError(f"a repetition must be between 0 and {MAX_TIMES} times, got {low} to {high}")
        return Repeated(pattern, low, high)


def _unquoted(text: str) -> str:
    return _ESCAPE.sub(_unescaped, text.rstrip("i")[1:-1])


def _unescaped(found: re.Match[str]) -> str:
    if code := found[1] or found[2] or found[3]:
        return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else found[0]
    if (character := _LETTERS.get(found[4])) is None:
        raise GrammarError(f"the escape {found[0]!r} in a string is not supported")
    return character
