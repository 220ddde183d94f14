"""Types of the fields of pooling requests."""

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from proa_gateway.openai.fields import MAX_PROMPTS, check_text

_STRING = {"type": "string"}
_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": _STRING},
    "required": ["type", "text"],
}
_TEXT = {
    "anyOf": [
        _STRING,
        {"type": "object", "properties": {"text": _STRING}, "required": ["text"], "additionalProperties": False},
        {
            "type": "object",
            "properties": {"content": {"type": "array", "items": _PART, "minItems": 1, "maxItems": 1}},
            "required": ["content"],
            "additionalProperties": False,
        },
    ]
}


def _texts(value: object) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    if not entries:
        raise PydanticCustomError("invalid_value", "must not be empty")
    if len(entries) > MAX_PROMPTS:
        raise PydanticCustomError("invalid_value", "must not have more than {limit}", {"limit": MAX_PROMPTS})
    return [_text(entry) for entry in entries]


def _text(value: object) -> str:
    """A string, `{"text": …}`, or vLLM's `{"content": [{"type": "text", "text": …}]}`."""
    if isinstance(value, dict) and value.keys() == {"content"}:
        parts = value["content"]
        value = parts[0] if isinstance(parts, list) and len(parts) == 1 else None
        if isinstance(value, dict) and value.get("type") != "text":
            raise PydanticCustomError("unsupported_parameter", "has a part that is not text: only text is supported")
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise PydanticCustomError("invalid_type", "must have strings, or objects with a text")
    return check_text(text)


ScoredText = Annotated[str, PlainValidator(_text), WithJsonSchema(_TEXT)]
"""A text, as a string or in an object."""
_LIST: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1}
ScoredTexts = Annotated[list[str], PlainValidator(_texts), WithJsonSchema({"anyOf": [*_TEXT["anyOf"], _LIST]})]
"""One text or a list of them."""
