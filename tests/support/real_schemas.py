"""Builders of JSON schemas for a small model: strings and arrays are bounded, as it may repeat itself for ever."""

from typing import Any

Schema = dict[str, Any]


def text(most: int = 24, **more: Any) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most, **more}


def whole(least: int = 0, most: int = 1000) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def listed(items: Schema, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def fields(**properties: Schema) -> Schema:
    """An object with all of these properties and no others, as strict schemas of OpenAI's are."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
