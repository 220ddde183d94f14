"""Pieces of grammars in llguidance's Lark dialect: literals, choices and regular expressions."""

import json
import re
from collections.abc import Iterable, Mapping

from llguidance import regex_to_lark

from proa.grammar.check import GrammarError

AddedTokens = Mapping[str, int]  # text -> id of all added tokens of the tokenizer, special or not

# Compile times grow faster than the length: `a*b*.*` repeated to 4 KiB takes 0.6 s, to 32 KiB 17 s.
MAX_REGEX = 4096  # characters
MAX_REGEXES = 16384  # characters of all regular expressions of a grammar


def quote(text: str) -> str:
    """The text as a Lark string, in ASCII."""
    if surrogate := re.search("[\ud800-\udfff]", text):
        raise GrammarError(f"lone surrogate \\u{ord(surrogate[0]):04x} in {text[:50]!a}")
    return json.dumps(text).replace("\x7f", "\\u007f")  # which JSON allows in strings and Lark does not


def literal(text: str, added_tokens: AddedTokens) -> str:
    """The text as a sequence of Lark strings and token ids.

    An added token may be special to llguidance, which then never matches its text, so each is written as its id.
    """
    return " ".join(
        quote(piece) if token_id is None else f"<[{token_id}]>" for piece, token_id in split(text, added_tokens)
    )


def split(text: str, added_tokens: AddedTokens) -> list[tuple[str, int | None]]:
    """The text cut at its added tokens, with their ids; the longest first where several match. Never empty."""
    names = sorted(filter(None, added_tokens), key=len, reverse=True)
    pieces: list[str] = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    found: list[tuple[str, int | None]] = [(piece, added_tokens.get(piece)) for piece in pieces if piece]
    return found or [("", None)]


def choice(texts: Iterable[str]) -> str:
    """A grammar of one of the texts. One terminal: as alternatives of a rule, 2,000 fail at the first token."""
    quoted = list(dict.fromkeys(map(quote, texts)))
    if not quoted:
        raise GrammarError("choice must hold at least one string")
    return f"start: CHOICE\nCHOICE: {' | '.join(quoted)}\n"


def regex(pattern: str) -> str:
    """The regular expression as a Lark terminal. It must match the whole text; anchors at both ends have no effect."""
    check_regexes([pattern])
    if not pattern:
        return quote("")  # two slashes begin a comment
    if len(pattern) - len(pattern.rstrip("\\")) & 1:  # llguidance drops it
        raise GrammarError("a regular expression must not end with a backslash that escapes nothing")
    return f"/{regex_to_lark(pattern, 'd')}/"


def check_regexes(patterns: Iterable[str]) -> None:
    """Check the lengths of all regular expressions of a grammar."""
    total = 0
    for pattern in patterns:
        total += len(pattern)
        if len(pattern) > MAX_REGEX:
            raise GrammarError(
                f"a regular expression must be at most {MAX_REGEX} characters long, this one has {len(pattern)}"
            )
    if total > MAX_REGEXES:
        raise GrammarError(f"regular expressions must be at most {MAX_REGEXES} characters long together, got {total}")
