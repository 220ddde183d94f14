"""The JSON types that a tool's schema allows for one of its arguments."""

from collections.abc import Mapping
from urllib.parse import unquote

from proa.grammar.schema_forms import TYPES

WORDS = {"null": "null", "true": "boolean", "false": "boolean"}  # of JSON, and their types
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
OF_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})  # keywords
MAX_REFERENCES = 20  # in a row

Schema = Mapping[str, object]


def property_schema(parameters: Schema, name: str) -> object:
    """The schema of an argument. None: it has none of its own."""
    properties = parameters.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def allowed_types(schema: object, root: Schema) -> frozenset[str]:
    """Return all types that a value may have; `TYPES` if the schema does not restrict them. `root`: the schema that
    `$ref` is in."""
    return _types(schema, root, set()) or TYPES


def is_text(types: frozenset[str]) -> bool:
    """Whether a value is a string, or else one of the words null, true and false."""
    return "string" in types and types <= {"string", "null", "boolean"}


def type_of(value: object) -> str:
    return _NAMES.get(type(value), "object")


def _types(schema: object, root: Schema, seen: set[int]) -> frozenset[str]:
    """Empty: any. `seen`: schemas that are not looked at again, so that a schema that contains itself has an end."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    declared = schema.get("type")
    if isinstance(declared, str | list):
        return TYPES.intersection([declared] if isinstance(declared, str) else map(str, declared))
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(type_of, values))
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(root, reference), root, seen)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(keyword), list):
            return frozenset().union(*(_types(part, root, seen) or TYPES for part in parts))
    parts = schema.get("allOf")
    found = (_types(part, root, seen) for part in parts) if isinstance(parts, list) else ()
    return next(filter(None, found), frozenset())


def resolve(schema: object, root: Schema) -> Schema:
    """The schema, or what it refers to. Empty: it is none, or leads nowhere."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = _resolve(root, reference)
    return {}


def _resolve(root: Schema, reference: str) -> object:
    """Return the target of a JSON pointer into the same schema. None if it is no pointer or has no target."""
    if not reference.startswith("#"):
        return None
    target: object = root
    for segment in filter(None, unquote(reference[1:]).split("/")):
        if not isinstance(target, Mapping):
            return None
        target = target.get(segment.replace("~1", "/").replace("~0", "~"))
    return target


def of_type(schema: object, name: str, root: Schema) -> Schema:
    """The schema of those values that have the JSON type `name`, one that the schema allows."""
    names = {"integer", "number"} if name == "number" else {name}
    left_out = frozenset() if names <= {"integer", "number"} else OF_NUMBERS
    resolved = {keyword: value for keyword, value in resolve(schema, root).items() if keyword not in left_out}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(parts := resolved.get(keyword), list):
            kept = [of_type(part, name, root) for part in parts if allowed_types(part, root) & names]
            return {**resolved, keyword: kept}
    if isinstance(values := resolved.get("enum"), list):
        resolved = {**resolved, "enum": [value for value in values if type_of(value) in names]}
    declared = resolved.get("type")
    if isinstance(declared, str) or "const" in resolved:
        return resolved
    return {**resolved, "type": sorted(names.intersection(declared)) if isinstance(declared, list) else name}
