"""The form of a JSON schema's keywords: what is no JSON schema in any draft, unlike one that cannot be enforced."""

from collections.abc import Iterable

from proa.grammar.check import GrammarError

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
MAX_QUOTED = 50  # characters of a value in a message
_NUMBER = ((int, float), "a number")
_STRING = (str, "a string")
_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_FORMS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _NUMBER),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _NUMBER),  # draft 4: a boolean, which is an int
    **dict.fromkeys(("pattern", "format", "$ref"), _STRING),
    **dict.fromkeys(_MAPS, (dict, "an object")),
    **dict.fromkeys(("enum", *_LISTS), (list, "an array")),
}


class InvalidSchema(GrammarError):
    """What is no JSON schema."""


def form_fault(schema: dict[str, object]) -> str | None:
    """What is wrong with a keyword of the schema that grammars enforce, as a sentence. The schemas in it are not looked
    into. llguidance checks most of this too, but panics if it quotes a long value that is not ASCII."""
    for keyword, value in schema.items():
        types, name = _FORMS.get(keyword, (object, ""))
        if not isinstance(value, types):
            return f"{keyword} must be {name}"
        if keyword == "type" and (fault := _type_fault(value)):
            return fault
        if keyword == "required" and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            return "required must be an array of strings"
        if not all(isinstance(each, (dict, bool)) for each in _held(keyword, value)):
            return f"{keyword} must hold schemas, which are objects or booleans"
    return None


def _type_fault(value: object) -> str | None:
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str):
            return "type must be a string or an array of strings"
        if name not in TYPES:
            return f"type {name[:MAX_QUOTED]!r} is none of {', '.join(sorted(TYPES))}"
    return None


def _held(keyword: str, value: object) -> Iterable[object]:
    """What must be a schema each."""
    if keyword in _MAPS and isinstance(value, dict):
        return value.values()
    if keyword in (*_LISTS, "items") and isinstance(value, list):  # `items` is a list until draft 2019-09
        return value
    return [value] if keyword in _SCHEMAS else ()
