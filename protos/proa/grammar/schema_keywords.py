"""simplify: the keywords of a JSON schema that llguidance 1.9.1 does not support, judged by their values.

What has no effect is dropped, what other keywords express exactly is rewritten. What is left is removed from its own
schema with a warning that has its path, or refused if the schema is strict. Paths are those of the values that a schema
is for, as in JSONPath: `$.items[*].tags`, `$.*` for properties without a name of their own.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from proa.grammar.check import GrammarError
from proa.grammar.schema_bounds import Findings, resolve
from proa.grammar.schema_forms import InvalidSchema, form_fault
from proa.grammar.schema_rewrites import (
    DEPENDENTS,
    FORMATS,
    LOOK_AROUND,
    MAX_NUMBER,
    Schema,
    add_ends,
    drop,
    is_number,
    object_of,
    rewrite,
)

MAX_SEGMENT = 50  # characters of a name in a path
MAX_SEGMENTS = 30  # of a path, the last ones
_MAX_FLOAT = 1.797e308  # a bound beyond it bounds no number that clients can read

_NOT_ENFORCED = (
    "contains",
    "if",
    "not",
    "uniqueItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LOOKED_AT = {*_NOT_ENFORCED, *_BOUNDS, "format", "pattern", "oneOf"}
_HOLDERS = {  # of schemas, with the segment of their path
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties"), ".*"),
    **dict.fromkeys(("items", "prefixItems", "additionalItems", "unevaluatedItems"), "[*]"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), ""),
}
_OF_2019 = {
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedProperties",
    "unevaluatedItems",
}
_UNKNOWN = {  # to a draft, by a part of `$schema`
    "draft-04": {"propertyNames", "contains", "if", "then", "else", *_OF_2019},
    "draft-06": {"if", "then", "else", *_OF_2019},
    "draft-07": _OF_2019,
}
_NAME = re.compile(r"[^\W\d][\w$-]*")


@dataclass(frozen=True, slots=True)
class _Place:
    """A schema that the root leads to. `segment`: of the path, behind that of `parent`."""

    schema: Schema
    parent: "_Place | None"
    segment: str

    @property
    def path(self) -> str:
        segments: list[str] = []
        place: _Place | None = self
        while place is not None and len(segments) < MAX_SEGMENTS:
            segments.append(place.segment)
            place = place.parent
        return "".join(["" if place is None else "$…", *reversed(segments)])


def simplify(root: Schema, *, strict: bool, findings: Findings) -> bool:
    """Change a schema in place. Returns whether a schema now stands in several places of it, as one object.

    Raises `InvalidSchema`, and `GrammarError` if `strict`.
    """
    places = _reachable(root)
    for place in places:
        if fault := form_fault(place.schema):
            raise InvalidSchema(f"{place.path}: {fault}")
    unknown: set[str] = next((names for draft, names in _UNKNOWN.items() if draft in str(root.get("$schema"))), set())
    is_shared = False
    for place in reversed(places):  # what they hold first
        for keyword in place.schema.keys() & unknown:
            del place.schema[keyword]
        drop(place.schema)
        is_shared |= rewrite(place.schema, root)
        add_ends(place.schema)
    for place in places:
        _leave_out(place, strict, findings)
    return is_shared


def _reachable(root: Schema) -> list[_Place]:
    """The root and all schemas that apply to some value through it."""
    places = [_Place(root, None, "$")]
    seen = {id(root)}
    definitions = [("", child) for name in ("$defs", "definitions") for child in object_of(root, name).values()]
    for place in places:  # grows meanwhile
        children = list(_children(place.schema, root))
        if any(child is None for _, child in children):  # the target of an anchor or `$id`, so that it may be any
            children += definitions
            definitions = []
        for segment, child in children:
            if isinstance(child, dict) and id(child) not in seen:
                seen.add(id(child))
                places.append(_Place(child, place, segment))
    return places


def _children(schema: Schema, root: Schema) -> Iterator[tuple[str, object]]:
    """What the keywords of a schema hold and lead to, each with its segment of the path. None: an unknown target."""
    for keyword, value in schema.items():
        if keyword == "$ref":
            yield "", resolve(root, value) if isinstance(value, str) else None
        elif keyword == "properties" and isinstance(value, dict):
            yield from ((_segment(name), child) for name, child in value.items())
        elif keyword == "patternProperties" and isinstance(value, dict):
            yield from ((".*", child) for child in value.values())
        elif (segment := _HOLDERS.get(keyword)) is None:
            continue
        elif isinstance(value, list):
            yield from ((segment and f"[{index}]", child) for index, child in enumerate(value))
        else:
            yield segment, value


def _segment(name: str) -> str:
    if len(name) > MAX_SEGMENT:
        name = f"{name[:MAX_SEGMENT]}…"
    return f".{name}" if _NAME.fullmatch(name) else f"[{json.dumps(name)}]"


def _leave_out(place: _Place, strict: bool, findings: Findings) -> None:
    """Remove what cannot be enforced, with warnings. Raises `GrammarError` if `strict`."""
    schema = place.schema
    if schema.keys().isdisjoint(_LOOKED_AT):
        return
    left_out = {keyword: keyword for keyword in _NOT_ENFORCED if keyword in schema}
    name = schema.get("format")
    if isinstance(name, str) and name not in FORMATS:
        left_out["format"] = f"format {name[:MAX_SEGMENT]!r}"
    if isinstance(pattern := schema.get("pattern"), str) and LOOK_AROUND.search(pattern):
        left_out["pattern"] = "pattern with look-around"
    for keyword in _BOUNDS:
        bound = schema.get(keyword)
        if not is_number(bound) or abs(bound) <= MAX_NUMBER:
            continue
        if abs(bound) >= _MAX_FLOAT and (bound < 0) == keyword.lower().endswith("minimum"):
            del schema[keyword]
        else:
            left_out[keyword] = f"{keyword} {str(bound)[:MAX_SEGMENT]}"
    for keyword, text in left_out.items():
        if strict:
            raise GrammarError(f"{place.path}: {text} is not supported")
        for each in (keyword, *DEPENDENTS.get(keyword, ())):
            schema.pop(each, None)
        findings.warn(f"{place.path}: {text} is not enforced")
    if "oneOf" in schema and not strict:
        findings.warn(f"{place.path}: oneOf is enforced as anyOf")
