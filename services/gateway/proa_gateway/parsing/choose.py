"""Choose a model's tool format."""

from dataclasses import replace

from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.formats import FORMATS
from proa_gateway.parsing.response_template import format_of_response_template, is_same_format


def choose_format(name: str | None, response_template: object, chat_template: str) -> ToolFormat | None:
    """The format called `name` if given, else that of the tokenizer's `response_template`, else the first whose signs
    all stand in the chat template. None: the model has none that is known. Raises `ValueError` for unknown names."""
    if name is not None:
        return _called(name)
    if (described := format_of_response_template(response_template)) is not None:
        return next((each for each in FORMATS if is_same_format(each, described)), described)
    found = next((each for each in FORMATS if all(sign in chat_template for sign in each.signs)), None)
    if found is not None and found.reasoning is not None and found.reasoning[1].strip() not in chat_template:
        return replace(found, reasoning=None)
    return found


def _called(name: str) -> ToolFormat:
    for each in FORMATS:
        if each.name == name:
            return each
    raise ValueError(f"unknown tool format {name!r}; there are {', '.join(each.name for each in FORMATS)}")
