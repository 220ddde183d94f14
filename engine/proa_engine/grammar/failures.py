"""Why llguidance cannot compile a grammar or go on with it: its messages as clauses for the client."""

import re

from llguidance import LLMatcher

from proa.grammar import clean

_NO_TOKENS = "no tokens of the tokenizer spell the text that must follow"
_DEAD_END = "no text can follow"

# Limits of complexity, by a part of llguidance's message.
_LIMITS = {
    "too many states": "its regular expressions need too many states",
    "too many expressions": "a regular expression takes too long to follow",
    "precomputation failed": "a regular expression takes too long to compile",
    "fuel exhausted": "a regular expression takes too long to compile",
    "Too many items": "it is too ambiguous",
    "row has": "it has too many alternatives at one place",
}
_REJECTED = re.compile(r"token .* doesn't satisfy the grammar; (?!forced bytes)", re.DOTALL)


def failure(matcher: LLMatcher) -> str:
    """Return why the matcher failed, as a clause. Empty: it did not, or because of a token that is not allowed."""
    return explain(matcher.get_error()) if matcher.is_error() else ""


def explain(message: str) -> str:
    """Return llguidance's message of a failed matcher as a clause, empty for a token that is not allowed."""
    if _REJECTED.search(message):
        return ""
    if "forced bytes" in message:
        return _NO_TOKENS
    if "NoExtension" in message:
        return _DEAD_END
    return next((clause for part, clause in _LIMITS.items() if part in message), clean(message))


def is_of_lexer(message: str) -> bool:
    """Whether the lexer failed, which all matchers of the grammar share."""
    return message.startswith("lexer error")


def is_limit(message: str) -> bool:
    """Whether the message is about a limit of llguidance."""
    return any(part in message for part in _LIMITS)
