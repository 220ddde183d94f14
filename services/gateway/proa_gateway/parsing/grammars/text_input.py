"""TextRules: the grammar of the input of a custom tool, as rules within the grammar of its call.

llguidance reads a text token by token, greedily, and cannot give back a character. In a JSON string the end of a line
and a quote begin with the same backslash, so with one terminal for each of the grammar's tokens, the terminal of a line
takes the backslash of the line's end, and no token is allowed after it: valid inputs were refused in every format with
JSON. A grammar without recursion is regular, so it becomes one terminal. A recursive grammar keeps its terminals, and
is refused where one of them could take a character of what follows it.
"""

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from proa.grammar import GrammarError
from proa.grammar.lark import quote
from proa_gateway.parsing.format import TextGrammar
from proa_gateway.parsing.grammars.lark_reader import START, read_lark
from proa_gateway.parsing.grammars.patterns import (
    ESCAPED,
    Characters,
    Literal,
    Named,
    OneOf,
    Pattern,
    Repeated,
    Token,
    of_regex,
    parts_of,
    walk,
    write,
)
from proa_gateway.parsing.grammars.rules import ANY, LarkRules

MAX_BYTES = 64 * 1024  # of a grammar
# Characters of the texts and classes of a grammar, with those of a rule in each of its places. Literals are cheap; with
# llguidance 1.9.1, 768 repetitions without a bound, as in `a*b*.*`, take 0.3 s to compile, 6,144 of them 12 s.
MAX_EXPANDED = 16 * 1024
_REPETITION = 32  # characters that such a repetition counts as
_RECURSIVE = "a recursive grammar is not supported in this format of tool calls"


class TextRules:
    def __init__(self, grammar: TextGrammar, rules: LarkRules) -> None:
        """`rules`: get the rules. Raises `GrammarError` for a grammar that cannot be held."""
        if len(grammar.definition) > MAX_BYTES:
            raise GrammarError(f"a grammar must be at most {MAX_BYTES} characters long")
        self._rules = rules
        self._definitions = _read(grammar)  # by name, `START` included
        names = _reachable(self._definitions)
        self._written: dict[str, str] = {}  # names in `rules` by those in the grammar
        regular = _in_order(self._definitions, names)
        if regular is None:  # only the terminals are
            regular = _in_order(self._definitions, [name for name in names if name.isupper()])
        if regular is None:
            raise GrammarError("a terminal of the grammar contains itself")
        self._regular = regular
        # All rules if one of them contains itself, otherwise none.
        self._recursive = [name for name in names if name not in regular]
        _check_size(self._definitions, regular)

    def in_json(self, end: str) -> str:
        """An expression for the input as the inside of a JSON string, and `end`, which begins with a quote."""
        if not self._recursive:
            return self._rules.terminal(f"{self._write(in_json=True)} {quote(end)}")
        for token in self._tokens():
            if not self._is_single(token) and any(self._may_contain(token, each) for each in ESCAPED):
                unless = "each of its terminals is one character, or has no quotes, backslashes and line ends"
                raise GrammarError(f"{_RECURSIVE} unless {unless}")
        return f"{self._write(in_json=True)} {self._rules.literal(end)}"

    def raw(self, end: str, whitespace: str = "", not_first: str = "") -> str:
        """An expression for the input itself, `whitespace` and `end`, which the input does not contain.

        `not_first`: what the input does not begin with; empty: it may begin with anything.
        """
        if not self._recursive:
            others = f"{ANY} {quote(end)} {ANY}" + (f" | {quote(not_first)} {ANY}" if not_first else "")
            text = f"({self._write(in_json=False)} & ~({others}))"
            return self._rules.text_until(end, text, whitespace)
        first = f"{whitespace}{end}"[0]
        for token in self._tokens():
            excluded = {end[0], *not_first[:1], *("" if self._is_single(token) else first)}
            if any(self._may_contain(token, each) for each in excluded):
                marks = ", ".join(dict.fromkeys(map(repr, (end[0], *not_first[:1], first))))
                raise GrammarError(f"{_RECURSIVE} unless its terminals are without {marks}, which may end the input")
        return f"{self._write(in_json=False)} {self._rules.literal(whitespace + end)}"

    def _write(self, *, in_json: bool) -> str:
        """Add the grammar to the rules, once. Returns the name of its beginning."""
        if START in self._written:
            return self._written[START]
        terminals: dict[Pattern, str] = {}  # of the recursive rules

        def refer(pattern: Named | Token) -> str:
            if isinstance(pattern, Named):
                return self._written[pattern.name]
            if not self._recursive:
                return write(pattern.part, refer, in_json=in_json)
            if pattern not in terminals:
                terminals[pattern] = self._rules.terminal(write(pattern.part, refer, in_json=in_json))
            return terminals[pattern]

        for name in self._regular:
            self._written[name] = self._rules.terminal(write(self._definitions[name], refer, in_json=in_json))
        self._written |= {name: f"{self._rules.prefix}input_{at}" for at, name in enumerate(self._recursive)}
        for name in self._recursive:
            body = write(self._definitions[name], refer, in_json=in_json)
            self._rules.lines.append(f"{self._written[name]}: {body}")
        return self._written[START]

    def _tokens(self) -> set[Pattern]:
        """What llguidance's lexer reads at once in a recursive grammar."""
        bodies = (self._definitions[name] for name in self._recursive)
        return {part.part for body in bodies for part in walk(body) if isinstance(part, Token)}

    def _may_contain(self, pattern: Pattern, character: str) -> bool:
        rest, seen = [pattern], set()
        while rest:
            for part in walk(rest.pop()):
                if isinstance(part, Literal) and character in part.text:
                    return True
                if isinstance(part, Characters) and part.matches(character):
                    return True
                if isinstance(part, Named) and part.name not in seen:
                    seen.add(part.name)
                    rest.append(self._definitions[part.name])
        return False

    def _is_single(self, pattern: Pattern) -> bool:
        """Whether it only matches texts of one character."""
        match pattern:
            case Literal(text):
                return len(text) == 1
            case Characters():
                return True
            case Named(name):
                return self._is_single(self._definitions[name])
            case OneOf(parts):
                return all(map(self._is_single, parts))
        return False


def _read(grammar: TextGrammar) -> Mapping[str, Pattern]:
    if grammar.syntax == "lark":
        return read_lark(grammar.definition)
    # It must match all of the input, with anchors at its ends or without.
    regex = grammar.definition.removeprefix("^")
    before = regex.removesuffix("$")
    is_anchor = (len(before) - len(before.rstrip("\\"))) % 2 == 0  # not an escaped `$`
    return {START: of_regex(before if is_anchor else regex)}


def _names(pattern: Pattern) -> Iterator[str]:
    return (part.name for part in walk(pattern) if isinstance(part, Named))


def _reachable(definitions: Mapping[str, Pattern]) -> list[str]:
    """The names that the grammar needs, its beginning first. Raises `GrammarError` for one that is not defined."""
    found = [START]
    for name in found:  # grows meanwhile
        for other in _names(definitions[name]):
            if other not in definitions:
                raise GrammarError(f"the grammar does not define {other!r}")
            if other not in found:
                found.append(other)
    return found


def _in_order(definitions: Mapping[str, Pattern], names: Iterable[str]) -> list[str] | None:
    """The names, each after those that it needs. None: one of them needs itself."""
    try:
        return list(TopologicalSorter({name: set(_names(definitions[name])) for name in names}).static_order())
    except CycleError:
        return None


def _check_size(definitions: Mapping[str, Pattern], order: Iterable[str]) -> None:
    sizes: dict[str, int] = {}
    for name in order:
        sizes[name] = _size(definitions[name], sizes)
        if sizes[name] > MAX_EXPANDED:
            most = f"{MAX_EXPANDED} characters and classes, with each rule in all its places"
            raise GrammarError(f"a tool's grammar must have at most {most}")


def _size(pattern: Pattern, sizes: Mapping[str, int]) -> int:
    match pattern:
        case Literal(text):
            return len(text)
        case Named(name):
            return sizes[name]
        case Repeated(part, low, high):
            return _size(part, sizes) * max(low, high or 0, 1) + (_REPETITION if high is None else 0)
    return max(sum(_size(part, sizes) for part in parts_of(pattern)), 1)
