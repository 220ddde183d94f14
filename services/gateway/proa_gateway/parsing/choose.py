"""Choose a model's tool format."""

from collections.abc import Mapping
from typing import Any

from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.formats import FORMATS
from proa_gateway.parsing.response_template import format_of_response_template, is_same_format


def choose_format(
    name: str | None, tokenizer_config: Mapping[str, Any], chat_template: str | None
) -> ToolFormat | None:
    """The format called `name` if given, else that of the tokenizer's `response_template`, else the first whose signs
    all stand in the chat template. None: the model has none that is known. Raises `ValueError` for unknown names."""
    if name is not None:
        return format_called(name)
    described = format_of_response_template(tokenizer_config.get("response_template"))
    if described is not None:
        return next((each for each in FORMATS if is_same_format(each, described)), described)
    return next((each for each in FORMATS if all(sign in (chat_template or "") for sign in each.signs)), None)


def format_called(name: str) -> ToolFormat:
    """Raises `ValueError` with all names if there is none with this one."""
    for each in FORMATS:
        if each.name == name:
            return each
    raise ValueError(f"unknown tool format {name!r}; there are {', '.join(each.name for each in FORMATS)}")
