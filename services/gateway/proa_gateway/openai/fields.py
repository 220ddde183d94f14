"""Types of request fields that plain annotations cannot say: texts or lists of them, and what is not supported.

Each validator tells the client which field is wrong and why; unions are resolved by hand, because pydantic reports
an error for each of their branches.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _refuse_unless(*neutral: object) -> AfterValidator:
    def refuse(value: object) -> object:
        if not any(value == other and type(value) is type(other) for other in neutral):
            raise PydanticCustomError("unsupported_parameter", "is not supported")
        return value

    return AfterValidator(refuse)


# Fields that would change what the request means, and are not honoured: any value but those that ask for nothing is
# refused by name.
Unsupported = Annotated[Any, _refuse_unless(None, False, [], {}, ""), Field(description="Not supported.")]
ToolChoice = Annotated[
    Any, _refuse_unless(None, "none", "auto"), Field(description="Without tools `none` and `auto` are the same.")
]
OnlyText = Annotated[Any, _refuse_unless(None, ["text"], {"type": "text"}), Field(description="Only text.")]


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("invalid_value", "must be valid Unicode: it has a lone surrogate") from None
    return value


def _texts(value: object) -> object:
    """The value as it is, once every text in it is known to be one. Not recursive: clients may nest deeply."""
    rest = [value]
    while rest:
        entry = rest.pop()
        if isinstance(entry, str):
            _text(entry)
        elif isinstance(entry, dict):
            rest += entry.keys()
            rest += entry.values()
        elif isinstance(entry, list):
            rest += entry
    return value


Text = Annotated[str, AfterValidator(_text)]
"""What tokenizers take: JSON's escapes can also spell half a character."""
TemplateValue = Annotated[Any, AfterValidator(_texts)]
"""Anything that a chat template may write into the prompt."""


def _variables(value: dict[str, Any]) -> dict[str, Any]:
    for name in ("messages", "add_generation_prompt"):
        if name in value:
            message = "must not have {name}: the request has a field for it"
            raise PydanticCustomError("invalid_value", message, {"name": name})
    return value


TemplateVariables = Annotated[dict[Text, TemplateValue], AfterValidator(_variables)]
"""A chat template's own variables by name."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _no_empty_string(value: list[str]) -> list[str]:
    if not all(value):
        raise PydanticCustomError("invalid_value", "must not contain an empty string")
    return value


Strings = Annotated[
    list[Text],
    BeforeValidator(_as_list),
    AfterValidator(_no_empty_string),
    Field(max_length=64),
    WithJsonSchema({"anyOf": [_TEXT | {"minLength": 1}, {"type": "array", "items": _TEXT | {"minLength": 1}}]}),
]
"""One non-empty text or several."""


def _prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, str):
        return [_text(value)]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("invalid_type", "must be a string, a list of strings or lists of token ids")
    if _is_ids(value):
        return [value]
    return [_text(entry) if isinstance(entry, str) else _ids(entry) for entry in value]


def _is_ids(value: list[Any]) -> bool:
    return all(type(entry) is int for entry in value)


def _ids(value: object) -> list[int]:
    if not isinstance(value, list) or not value or not _is_ids(value):
        raise PydanticCustomError("invalid_type", "must be a string, a list of strings or lists of token ids")
    return value


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
"""One or more prompts, each a text or token ids."""


def _content(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "must be a string or a list of content parts")
    return "\n".join(_text_part(part) for part in value)


def _text_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError("invalid_type", "must have content parts that are objects with a type")
    if kind != "text":
        raise PydanticCustomError(
            "unsupported_parameter", "has a part of type {kind}: only text is supported", {"kind": repr(kind[:40])}
        )
    if not isinstance(part.get("text"), str):
        raise PydanticCustomError("invalid_type", "has a text part without text")
    return _text(part["text"])


_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
    "required": ["type", "text"],
}
Content = Annotated[
    str | None,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]}),
]
"""A message's text; parts of type text are joined by line ends."""


def _biases(value: dict[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise PydanticCustomError(
                "invalid_value", "must have token ids as keys, not {key}", {"key": repr(key[:40])}
            )
        if not -100 <= bias <= 100:
            raise PydanticCustomError("invalid_value", "must have values from -100 to 100")
        biases[int(key)] = bias
    return biases


LogitBias = Annotated[dict[str, float], AfterValidator(_biases)]
"""Token id, as JSON's keys are texts -> what is added to its logit. The value's keys are integers."""
