"""What an output must match: `StructuredOutputsParams` as a client writes it, `Grammar` as an engine reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_GRAMMAR_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A grammar, and the part of the output that it constrains. The rest of the output is free.

    Lists are accepted and kept as tuples. Raises `ValueError` for a value that no engine accepts.
    """

    text: str  # in llguidance's Lark dialect
    start_after: tuple[int, ...] = ()  # begin with the token after one of these; empty: with the first token
    free_if_first: tuple[int, ...] = ()  # only if the output begins with one of these, look for `start_after`
    repeats: bool = False  # a complete grammar makes the output free until the next token of `start_after`

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("the text of a grammar must not be empty")
        check_size(self.text)
        for name in ("start_after", "free_if_first"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.start_after and (self.free_if_first or self.repeats):
            raise ValueError("free_if_first and repeats of a grammar need start_after")


def check_size(text: str) -> None:
    """Raises `ValueError` for the text of a grammar that is longer than an engine accepts, or is not Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"a grammar must not contain the lone surrogate \\u{ord(text[error.start]):04x}") from None
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"a grammar must be at most {MAX_GRAMMAR_BYTES} bytes long, this one has {size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint of the output, with vLLM's names: exactly one of the first group, and how JSON is written.

    Raises `ValueError` naming the forms that are set, if there is not exactly one.
    """

    json: str | bool | Mapping[str, object] | None = None  # a JSON schema, or its text
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark, or EBNF as llama.cpp has it (GBNF)
    json_object: bool | None = None  # any JSON object
    structural_tag: str | Mapping[str, object] | None = None  # as xgrammar has it, or its text

    whitespace_pattern: str | None = None  # regex of the whitespace between JSON's tokens
    disable_any_whitespace: bool = False  # no whitespace in JSON; else, without a pattern, one space after , and :
    disable_additional_properties: bool = True  # where a JSON schema has properties but no additionalProperties

    def __post_init__(self) -> None:
        forms = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in forms if getattr(self, name) is not None]
        if self.json_object is False:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                f"structured outputs need exactly one of {', '.join(forms)}; got {' and '.join(given) or 'none'}"
            )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ValueError("whitespace_pattern and disable_any_whitespace exclude each other")
