"""CORS: which pages of other origins browsers let use the API."""

import json
from dataclasses import dataclass
from typing import Self

from proa.options import check_options, option


@dataclass(frozen=True, slots=True)
class Strings:
    values: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `ValueError`."""
        message = f"{text!r} is not a list of strings as JSON"
        try:
            values = json.loads(text)
        except ValueError:
            raise ValueError(message) from None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(message)
        return cls(tuple(values))

    def __str__(self) -> str:
        return json.dumps(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """vLLM's flags."""

    allowed_origins: Strings = option(
        Strings(),
        'origins of the pages that may use the API, as JSON; ["*"] for all',
        metavar="JSON",
        parse=Strings.from_json,
    )
    allow_credentials: bool = option(False, "let these pages send cookies")
    allowed_methods: Strings = option(
        Strings(("*",)),
        "methods that these pages may use, as JSON",
        metavar="JSON",
        parse=Strings.from_json,
    )
    allowed_headers: Strings = option(
        Strings(("*",)),
        "headers that these pages may send, as JSON",
        metavar="JSON",
        parse=Strings.from_json,
    )

    def __post_init__(self) -> None:
        check_options(self)
