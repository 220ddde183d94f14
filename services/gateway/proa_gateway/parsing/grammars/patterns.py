"""Patterns of texts: regular expressions as nodes, and how these are written for llguidance, for the texts themselves
or for their spelling in a JSON string.

llguidance matches bytes. In a JSON string some characters have an escape, so a class of characters becomes those that
stand for themselves, and the escapes of the others, each with the one spelling of `json.dumps`. As every text has one
spelling, the spelled pattern matches exactly the spellings of the texts that the pattern matches.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from re import _parser  # `sre_parse` is its deprecated name
from typing import Any

from proa.grammar import GrammarError
from proa.grammar.lark import check_regexes, quote
from proa_gateway.parsing.json_text import escape

MAX_LEVELS = 50  # of groups in a regular expression
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
ESCAPED = "".join(map(chr, range(0x20))) + '"\\'
"""The characters that have an escape in JSON."""
_LETTERS = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}  # of escapes
_DIGITS = ((0x30, 0x39),)
# Unicode's property White_Space, as in the regular expressions of Rust.
_SPACES = (
    *((0x09, 0x0D), (0x20, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_FLAGS = re.IGNORECASE | re.MULTILINE | re.DOTALL | re.UNICODE
_TOKEN = re.compile(r"\\.|\[\^?\]?((?:\\.|[^\]\\])*)\]|\(\?<(?=[A-Za-z_])|[^\\\[(]+|.", re.DOTALL)
_CLASS_SYNTAX = re.compile(r"\\.|(\[|&&|--|~~|\|\|)", re.DOTALL)
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Characters:
    r"""One character, from ranges of code points and from `classes`, which are `\w` and `\W`."""

    ranges: Ranges
    classes: str = ""
    is_negated: bool = False
    ignores_case: bool = False

    def matches(self, character: str) -> bool:
        forms = {character, character.lower(), character.upper()} if self.ignores_case else {character}
        is_word = character.isalnum() or character == "_"
        is_in = (r"\w" if is_word else r"\W") in self.classes or any(
            low <= ord(form) <= high for form in forms if len(form) == 1 for low, high in self.ranges
        )
        return is_in is not self.is_negated


@dataclass(frozen=True, slots=True)
class Series:
    parts: "tuple[Pattern, ...]"


@dataclass(frozen=True, slots=True)
class OneOf:
    parts: "tuple[Pattern, ...]"


@dataclass(frozen=True, slots=True)
class Repeated:
    """`high` None: any number."""

    part: "Pattern"
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Named:
    """What a grammar defines by this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """A part of a grammar's rule that is no rule: what a lexer reads at once."""

    part: "Pattern"


Pattern = Literal | Characters | Series | OneOf | Repeated | Named | Token


def parts_of(pattern: Pattern) -> tuple[Pattern, ...]:
    match pattern:
        case Series(parts) | OneOf(parts):
            return parts
        case Repeated(part) | Token(part):
            return (part,)
    return ()


def walk(pattern: Pattern) -> Iterator[Pattern]:
    """The pattern and all its parts, without what names stand for."""
    rest = [pattern]
    while rest:
        rest += parts_of(each := rest.pop())
        yield each


def of_text(text: str, *, ignores_case: bool = False) -> Pattern:
    if not ignores_case or text.upper() == text.lower():
        return Literal(text)
    return Series(tuple(Characters(((ord(each), ord(each)),), ignores_case=True) for each in text))


def of_regex(regex: str, flags: str = "") -> Pattern:
    """`flags`: letters, as behind a regular expression in Lark. Raises `GrammarError` for what is no regular expression
    of Python, and for what llguidance cannot hold, such as anchors."""
    check_regexes([regex])
    try:
        parsed = _parser.parse(_checked(regex), _flags(flags))
        return _converted(parsed, parsed.state.flags, 0)
    except (re.error, OverflowError) as error:
        raise GrammarError(f"invalid regex: {error}") from None
    except RecursionError:
        raise GrammarError("a regular expression is nested too deeply") from None


def _flags(letters: str) -> int:
    if unknown := set(letters) - set("imsu"):
        raise GrammarError(f"the flag {min(unknown)!r} of a regular expression is not supported")
    return sum(re.RegexFlag[letter.upper()].value for letter in set(letters))


def _checked(regex: str) -> str:
    """The regular expression in Python's spelling. Raises `GrammarError` for a class with another meaning in Rust."""
    written = []
    for token in _TOKEN.finditer(regex):
        if token[1] and any(each[1] for each in _CLASS_SYNTAX.finditer(token[1])):
            raise GrammarError(f"escape [, &&, --, ~~ and || within the class {token[0][:50]!r}")
        written.append("(?P<" if token[0] == "(?<" else token[0])
    return "".join(written)


def _converted(tree: Any, flags: int, depth: int) -> Pattern:
    """`tree`: of Python's parser of regular expressions. `flags`: those that hold for it. `depth`: of groups."""
    if flags & ~_FLAGS:
        raise GrammarError("only the flags i, m, s and u of a regular expression are supported")
    if depth > MAX_LEVELS:
        raise GrammarError(f"groups of a regular expression must be nested at most {MAX_LEVELS} levels deep")
    parts = list(_joined(_converted_part(str(kind), value, flags, depth + 1) for kind, value in tree))
    return parts[0] if len(parts) == 1 else Series(tuple(parts))


def _converted_part(kind: str, value: Any, flags: int, depth: int) -> Pattern:
    ignores_case = bool(flags & re.IGNORECASE)
    match kind:
        case "LITERAL":
            return of_text(chr(value), ignores_case=ignores_case)
        case "NOT_LITERAL":
            return Characters(((value, value),), "", True, ignores_case)
        case "ANY":
            return Characters(((0, _LAST),) if flags & re.DOTALL else ((0, 9), (11, _LAST)))
        case "IN":
            return _class(value, ignores_case=ignores_case)
        case "BRANCH":
            return OneOf(tuple(_converted(each, flags, depth) for each in value[1]))
        case "SUBPATTERN":
            _, added, removed, tree = value
            return _converted(tree, flags & ~removed | added, depth)
        case "MAX_REPEAT" | "MIN_REPEAT":
            low, high, tree = value
            return Repeated(_converted(tree, flags, depth), low, None if high == _parser.MAXREPEAT else int(high))
        case "AT":
            raise GrammarError("anchors and word boundaries are not supported within a regular expression")
        case "ASSERT" | "ASSERT_NOT":
            raise GrammarError("look-around is not supported in a regular expression")
    raise GrammarError("references to groups, and groups and repetitions that give nothing back, are not supported")


def _joined(parts: Iterable[Pattern]) -> Iterator[Pattern]:
    """The parts with neighbouring literals as one."""
    text = ""
    for part in parts:
        if isinstance(part, Literal):
            text += part.text
            continue
        if text:
            yield Literal(text)
            text = ""
        yield part
    if text:
        yield Literal(text)


def _class(items: Any, *, ignores_case: bool) -> Characters:
    ranges: list[tuple[int, int]] = []
    classes, is_negated = "", False
    for kind, value in items:
        match str(kind), str(value):
            case "NEGATE", _:
                is_negated = True
            case "LITERAL", _:
                ranges.append((value, value))
            case "RANGE", _:
                ranges.append(value)
            case "CATEGORY", "CATEGORY_DIGIT":
                ranges += _DIGITS
            case "CATEGORY", "CATEGORY_NOT_DIGIT":
                ranges += _all_but(_DIGITS)
            case "CATEGORY", "CATEGORY_SPACE":
                ranges += _SPACES
            case "CATEGORY", "CATEGORY_NOT_SPACE":
                ranges += _all_but(_SPACES)
            case "CATEGORY", name:
                classes += r"\w" if name == "CATEGORY_WORD" else r"\W"
    return Characters(_merged(ranges), classes, is_negated, ignores_case)


def _all_but(ranges: Ranges) -> Iterator[tuple[int, int]]:
    start = 0
    for low, high in ranges:
        yield start, low - 1
        start = high + 1
    yield start, _LAST


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def write(pattern: Pattern, refer: Callable[[Named | Token], str], *, in_json: bool) -> str:
    """The pattern as an expression in Lark. `refer` writes names and tokens."""
    match pattern:
        case Literal(text):
            return quote(escape(text) if in_json else text)
        case Characters():
            return _written_class(pattern, in_json=in_json)
        case Series(parts):
            return f"({' '.join(write(part, refer, in_json=in_json) for part in parts)})" if parts else '""'
        case OneOf(parts):
            return f"({' | '.join(write(part, refer, in_json=in_json) for part in parts)})"
        case Repeated(part, low, high):
            written = f"({write(part, refer, in_json=in_json)})"
            return f"{written}{_times(low, high)}" if high != 0 else '""'
        case Named() | Token():
            return refer(pattern)


def _times(low: int, high: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return short.get((low, high)) or f"{{{low},{'' if high is None else high}}}"


def _written_class(characters: Characters, *, in_json: bool) -> str:
    items = "".join(_written_ranges(characters.ranges)) + characters.classes
    whole = f"[{'^' if characters.is_negated else ''}{items}]"
    ordinary = rf'[{whole}&&[^\x00-\x1f"\\]]' if in_json else whole
    written = [f"/(?i:{ordinary})/" if characters.ignores_case else f"/{ordinary}/"]
    if not in_json:
        return written[0]
    escaped = [each for each in ESCAPED if characters.matches(each)]
    if not (characters.is_negated or characters.classes) and all(high < 0x20 for _, high in characters.ranges):
        written.clear()  # no character stands for itself
    return f"({' | '.join([*written, *([_escapes(escaped)] if escaped else [])])})"


def _written_ranges(ranges: Ranges) -> Iterator[str]:
    """The ranges within a class, without surrogates, which are no characters for llguidance."""
    for low, high in ranges:
        low = _SURROGATES[1] + 1 if _SURROGATES[0] <= low <= _SURROGATES[1] else low
        high = _SURROGATES[0] - 1 if _SURROGATES[0] <= high <= _SURROGATES[1] else high
        if low <= high:
            yield rf"\x{{{low:x}}}-\x{{{high:x}}}" if low < high else rf"\x{{{low:x}}}"


def _escapes(characters: Iterable[str]) -> str:
    r"""A regular expression for the escapes of these characters, such as `\\(?:[nt]|u00(?:1[bf]))`."""
    letters, digits = "", {"0": "", "1": ""}
    for character in characters:
        if letter := _LETTERS.get(character):
            letters += re.escape(letter)
        else:
            code = f"{ord(character):02x}"
            digits[code[0]] += code[1]
    codes = "|".join(f"{first}[{seconds}]" for first, seconds in digits.items() if seconds)
    both = [*([f"[{letters}]"] if letters else []), *([f"u00(?:{codes})"] if codes else [])]
    return rf"/\\(?:{'|'.join(both)})/"
