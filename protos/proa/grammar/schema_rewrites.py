"""Rewrites of one JSON schema, in place: keywords without an effect are dropped, others are expressed by those that
llguidance 1.9.1 supports, and numbers get ends.

Values of keywords that llguidance does not support may have any type.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from proa.grammar.schema_bounds import resolve
from proa.grammar.schema_forms import TYPES

Schema = dict[str, object]

FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
MAX_NUMBER = 9 * 10**18  # llguidance takes bounds of 64 bits, but not the two ends

DEPENDENTS = {  # keywords that mean nothing without another one
    "contains": ("minContains", "maxContains"),
    "if": ("then", "else"),
}

_MAX_LENGTHS = {"date-time": 35, "time": 24, "hostname": 253}  # times with nine digits of a second and an offset
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_COMBINING = {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "dependencies", "$dynamicRef"}
_EFFECTS = {
    "uniqueItems",
    "propertyNames",
    "not",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
}
_COUNTS = {"minLength", "minItems", "minProperties", "maxLength", "maxItems", "maxProperties"}
_ANCHORS = {"$dynamicAnchor", "$recursiveAnchor"}  # of references that are not followed
_DROPPED = {*_EFFECTS, *_COUNTS, *_ANCHORS, *DEPENDENTS, *(name for names in DEPENDENTS.values() for name in names)} | {
    "format"
}
_REWRITTEN = {"unevaluatedProperties", "unevaluatedItems", "propertyNames", "not", "properties", "format"}
_TYPES = ("null", "boolean", "number", "string", "array", "object")
# Formats that say how a text is shown or what it is for.
_ANNOTATING_FORMATS = {"password", "binary", "path", "file-path", "directory-path"}
# Look-around in Zod's patterns of formats, which llguidance does not have: each holds for all texts of the format.
_IMPLIED = {
    "email": (r"(?!\.)", r"(?!.*\.\.)"),
    "duration": (r"(?!.*W)", r"(?=\d|T\d)", r"(?=\d)"),
    "hostname": (r"(?=.{1,253}\.?$)",),
}
# As llguidance has them.
_NAME_PATTERNS = {
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "date": r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$",
}
LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")
_NEVER: Schema = {"type": []}  # as `false`, and an object that can be changed in place


def drop(schema: Schema) -> None:
    """Delete keywords that have no effect on which values match."""
    if schema.keys().isdisjoint(_DROPPED):
        return
    for keyword in schema.keys() & _COUNTS:
        value = schema[keyword]
        if isinstance(value, float) and value.is_integer():
            value = schema[keyword] = int(value)
        if value == 0 and keyword.startswith("min"):
            del schema[keyword]
    if "if" in schema and all(_is_any(schema.get(keyword, True)) for keyword in ("then", "else")):
        del schema["if"]
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        schema.pop("contains", None)
    for keyword in schema.keys() & _EFFECTS:
        if _has_no_effect(keyword, schema[keyword], schema):
            del schema[keyword]
    for keyword, dependents in DEPENDENTS.items():
        for dependent in dependents if keyword not in schema else ():
            schema.pop(dependent, None)
    for keyword in schema.keys() & _ANCHORS:
        del schema[keyword]
    if isinstance(name := schema.get("format"), str) and _has_no_format(schema, name):
        del schema["format"]


def _has_no_format(schema: Schema, name: str) -> bool:
    """Whether the format says nothing about strings, or no more than the pattern beside it, as Zod's own names."""
    types = _type_names(schema.get("type"))
    is_of_string = types is None or "string" in types
    return not is_of_string or name in _ANNOTATING_FORMATS or (name not in FORMATS and "pattern" in schema)


def _has_no_effect(keyword: str, value: object, schema: Schema) -> bool:
    match keyword:
        case "uniqueItems":
            return value is False or schema.get("maxItems") in (0, 1)
        case "propertyNames":
            return _is_any(value) or (isinstance(value, dict) and _without_annotations(value) == {"type": "string"})
        case "not":
            return value is False
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            required = array_of(schema, "required")
            values = value.values() if isinstance(value, dict) else (False,)
            return all(
                _is_any(each) or (isinstance(each, list) and all(name in required for name in each)) for each in values
            )
        case "unevaluatedProperties":
            return _is_any(value) or "additionalProperties" in schema
        case "unevaluatedItems":
            return _is_any(value) or "additionalItems" in schema or isinstance(schema.get("items"), dict | bool)
    raise AssertionError(keyword)


def rewrite(schema: Schema, root: Schema) -> bool:
    """Express keywords by others, exactly. Returns whether one schema now stands in several places."""
    if schema.keys().isdisjoint(_REWRITTEN):
        return False
    if schema.keys().isdisjoint(_COMBINING):
        if "unevaluatedProperties" in schema:  # which nothing else evaluates
            schema["additionalProperties"] = schema.pop("unevaluatedProperties")
        if "unevaluatedItems" in schema:
            keyword = "additionalItems" if "items" in schema else "items"
            schema[keyword] = schema.pop("unevaluatedItems")
    is_shared = "propertyNames" in schema and _rewrite_names(schema, root)
    if "not" in schema:
        _rewrite_not(schema, schema["not"])
    properties = object_of(schema, "properties")
    for name in [name for name, child in properties.items() if child == _NEVER]:
        properties[name] = False
    if isinstance(pattern := schema.get("pattern"), str):
        for text in _IMPLIED.get(str(schema.get("format")), ()):
            schema["pattern"] = pattern = pattern.replace(text, "")
    return is_shared


def _rewrite_names(schema: Schema, root: Schema) -> bool:
    """Express `propertyNames` by properties that may be there, or by their pattern. Returns as `rewrite`."""
    if "patternProperties" in schema:
        return False
    properties, others = object_of(schema, "properties"), schema.get("additionalProperties", True)
    names = _names(schema["propertyNames"], root)
    if names is not None:
        allowed = set(names)
        kept = {name: child for name, child in properties.items() if name in allowed}
        added = {name: others for name in names if name not in properties and others is not False}
        schema["properties"] = kept | added
    elif not properties and (pattern := _pattern(schema["propertyNames"], root)) is not None:
        schema["patternProperties"] = {pattern: others}
    else:
        return False
    del schema["propertyNames"]
    schema["additionalProperties"] = False
    return names is not None and isinstance(others, dict)


def _names(schema: object, root: Schema) -> Sequence[str] | None:
    """The strings that match, if the schema lists them. None: it does not."""
    if schema is False:
        return ()
    schema = _target(schema, root)
    values: object = None
    if schema.keys() == {"anyOf"}:
        parts = [_names(part, {}) for part in array_of(schema, "anyOf")]
        return None if None in parts else [name for part in parts for name in part or ()]
    if schema.keys() <= {"type", "enum"}:
        values = schema.get("enum")
    elif schema.keys() <= {"type", "const"}:
        values = [schema["const"]]
    if not isinstance(values, list) or schema.get("type", "string") != "string":
        return None
    return [value for value in values if isinstance(value, str)]


def _pattern(schema: object, root: Schema) -> str | None:
    """A pattern of the strings that match. None: there is none."""
    schema = _target(schema, root)
    if schema.pop("type", "string") != "string":
        return None
    pattern, name, low, high = (schema.get(keyword) for keyword in ("pattern", "format", "minLength", "maxLength"))
    if schema.keys() == {"format"}:
        return _NAME_PATTERNS.get(str(name))
    if isinstance(pattern, str) and LOOK_AROUND.search(pattern):
        return None
    # A pattern for all of the text is a library's spelling of the format.
    if isinstance(pattern, str) and (name is None or (pattern[:1] == "^" and pattern[-1:] == "$")):
        return pattern if schema.keys() <= {"pattern", "format"} else None
    if schema.keys() <= {"minLength", "maxLength"} and isinstance(low, int | None) and isinstance(high, int | None):
        return rf"^[\s\S]{{{low or 0},{'' if high is None else high}}}$"
    return None


def _target(schema: object, root: Schema) -> Schema:
    """The schema without annotations and what has no effect, or what it refers to."""
    if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str):
        schema = resolve(root, reference)
    found = _without_annotations(schema) if isinstance(schema, dict) else {"not": {}}
    drop(found)
    return found


def _rewrite_not(schema: Schema, refused: object) -> None:
    if _is_any(refused):
        schema.clear()
        schema.update(_NEVER)
        return
    if not isinstance(refused, dict):
        return
    refused = _without_annotations(refused)
    if refused.keys() == {"type"}:
        if (types := _other_types(schema.get("type", list(_TYPES)), refused["type"])) is not None:
            del schema["not"]
            schema["type"] = types
        return
    excluded, values = _values(refused), _values(schema)
    if refused.keys() <= {"enum", "const"} and excluded is not None and values is not None:
        keys = set(map(_key, excluded))
        schema["enum"] = [value for value in values if _key(value) not in keys]
        schema.pop("const", None)
        del schema["not"]


def _other_types(types: object, refused: object) -> list[str] | None:
    """The types that are not refused. None: types cannot express it."""
    names, excluded = _type_names(types), _type_names(refused)
    if (
        names is None
        or excluded is None
        or ("integer" in excluded and {"number", "integer"} & set(names) == {"number"})
    ):
        return None
    if "number" in excluded:
        excluded = [*excluded, "integer"]
    return [name for name in names if name not in excluded]


def _type_names(types: object) -> list[str] | None:
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or not all(isinstance(name, str) and name in TYPES for name in names):
        return None
    return names


def _values(schema: Schema) -> list[object] | None:
    """The values that `const` or else `enum` list."""
    if "const" in schema:
        return None if "enum" in schema else [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _key(value: object) -> str:
    """One text for values that are equal in JSON Schema, where 1 and 1.0 are, and 1 and true are not."""

    def number(text: str) -> object:
        return int(float(text)) if float(text).is_integer() else float(text)

    return json.dumps(json.loads(json.dumps(value), parse_float=number), sort_keys=True)


def add_ends(schema: Schema) -> None:
    """Bound integers and times, whose digits a model may repeat until `max_tokens`: an integer has 19 digits at most, a
    second nine. Numbers stay free: bounds would exclude exponents."""
    types = schema.get("type")
    is_integer = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    if is_integer and not schema.keys() & {"enum", "const"}:
        _add_end(schema, "minimum", "exclusiveMinimum", -1)
        _add_end(schema, "maximum", "exclusiveMaximum", 1)
    name, longest = schema.get("format"), schema.get("maxLength")
    if isinstance(name, str) and name in _MAX_LENGTHS:
        end = _MAX_LENGTHS[name]
        schema["maxLength"] = min(longest, end) if isinstance(longest, int | float) else end


def _add_end(schema: Schema, inclusive: str, exclusive: str, sign: int) -> None:
    bounds = {keyword: schema.get(keyword) for keyword in (inclusive, exclusive)}
    numbers = {keyword: bound * sign for keyword, bound in bounds.items() if is_number(bound)}
    for keyword in [keyword for keyword, number in numbers.items() if number > MAX_NUMBER]:
        del schema[keyword], numbers[keyword]
    if not numbers:
        schema[inclusive] = sign * MAX_NUMBER


def _is_any(schema: object) -> bool:
    return schema is True or (isinstance(schema, dict) and not _without_annotations(schema))


def _without_annotations(schema: Mapping[str, object]) -> Schema:
    return {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def object_of(schema: Schema, keyword: str) -> Schema:
    value = schema.get(keyword)
    return value if isinstance(value, dict) else {}


def array_of(schema: Schema, keyword: str) -> list[object]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
