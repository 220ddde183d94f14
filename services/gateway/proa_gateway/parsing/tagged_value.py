"""A value that a model wrote as plain text, as JSON of a type that the schema allows."""

import json
from typing import NoReturn

from proa_gateway.parsing.json_text import PYTHON_WORDS, quoted
from proa_gateway.parsing.literal_reader import literal_to_json
from proa_gateway.parsing.schema_types import WORDS, is_text, type_of


def to_json(text: str, types: frozenset[str]) -> str:
    """The text itself if it is JSON of one of the types, else what Python would read, else a string."""
    if is_text(types):
        return text if WORDS.get(text) in types else quoted(text)
    value = text.strip()
    value = PYTHON_WORDS.get(value, value)
    if (type_ := _type(value)) is None and value.startswith(("{", "[")):
        value = literal_to_json(value) or ""
        type_ = _type(value)
    if type_ in types or (type_ == "integer" and "number" in types):
        return value
    return quoted(text) if type_ is None or "string" in types else value


def _type(text: str) -> str | None:
    """None: the text is not JSON."""
    try:
        return type_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
