"""JSON schemas as `%json` of llguidance's Lark dialect, with bounds on what they cost to compile."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from proa.contract.grammar import MAX_GRAMMAR_BYTES
from proa.grammar.check import GrammarError
from proa.grammar.closed_objects import close_objects
from proa.grammar.lark import check_regexes
from proa.grammar.schema_bounds import Findings, check_bounds, check_levels
from proa.grammar.schema_keywords import simplify

MAX_DEPTH = 100
MAX_VALUES = 65_536  # of a schema in which `propertyNames` are written as properties

_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # name -> schema
_DATA = {"enum", "const", "default", "examples"}
_TOO_DEEP = f"a JSON schema must be nested at most {MAX_DEPTH} levels deep"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOptions:
    """`strict`: refuse what cannot be held exactly; else `oneOf` is applied as `anyOf`, and other keywords are removed.
    `whitespace`: regular expression of the whitespace between tokens; None: one space after , and : if `spaces`.
    `closed`: see `close_objects`."""

    strict: bool = False
    whitespace: str | None = None
    spaces: bool = True
    closed: bool = True

    def x_guidance(self) -> dict[str, object]:
        if self.whitespace is not None:
            return {"whitespace_pattern": self.whitespace, "coerce_one_of": not self.strict}
        space = " " if self.spaces else ""
        return {
            "whitespace_flexible": False,
            "item_separator": f",{space}",
            "key_separator": f":{space}",
            "coerce_one_of": not self.strict,
        }


class _Kind(Enum):
    SCHEMA = auto()
    MAP = auto()
    DATA = auto()


@dataclass(frozen=True, slots=True)
class _Place:
    value: dict[str, object] | list[object]
    kind: _Kind
    parent: int  # index of the place that holds this one; -1: none
    depth: int


def json_schema(schema: object, options: JsonOptions, findings: Findings) -> str:
    """A `%json` expression. `schema`: parsed, or its text. Adds to `findings`."""
    root, places = _supported(schema, findings, strict=options.strict)
    return _expression(root, places, options, findings)


def json_expression(schema: object, options: JsonOptions, findings: Findings) -> str:
    """As `json_schema`, for a schema that `supported_schema` returned, or a part of one."""
    root = _copy(schema)
    return _expression(root, _places(root), options, findings)


def supported_schema(schema: object, findings: Findings, *, strict: bool) -> dict[str, object]:
    """A copy with only those keywords that grammars enforce; see `simplify`. Raises `GrammarError`."""
    return _supported(schema, findings, strict=strict)[0]


def _supported(schema: object, findings: Findings, *, strict: bool) -> tuple[dict[str, object], list[_Place]]:
    """As `supported_schema`, with the places of the copy, and of what was removed from it."""
    root = _copy(schema)
    root.pop("x-guidance", None)  # llguidance's options, such as one that ignores unknown keywords
    places = _places(root)
    if simplify(root, strict=strict, findings=findings):
        root = _unshared(root)
        places = _places(root)
    return root, places


def _unshared(root: dict[str, object]) -> dict[str, object]:
    """A copy in which no schema stands in two places."""
    sizes: dict[int, int] = {}

    def size(value: object) -> int:
        """The number of values in it, one more than once if it stands there so often."""
        if not isinstance(value, (dict, list)):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = 1 + sum(map(size, value.values() if isinstance(value, dict) else value))
        return sizes[id(value)]

    if size(root) > MAX_VALUES:
        raise GrammarError("the JSON schema has too many property names for the size of their schemas")
    return _copy(json.dumps(root))


def _expression(root: dict[str, object], places: list[_Place], options: JsonOptions, findings: Findings) -> str:
    _check_levels(places)
    if options.closed:
        close_objects(root, _schemas(places))
    _check_bounds(places, findings)
    if options.whitespace is not None:
        check_regexes([options.whitespace])
    return f"%json {json.dumps({**root, 'x-guidance': options.x_guidance()})}"


def check_schema(root: dict[str, object], findings: Findings) -> None:
    """Check a schema against the bounds on depth and cost. Adds to `findings`."""
    places = _places(root)
    _check_levels(places)
    _check_bounds(places, findings)


def _schemas(places: list[_Place]) -> list[dict[str, object]]:
    return [place.value for place in places if place.kind is _Kind.SCHEMA and isinstance(place.value, dict)]


def _check_levels(places: list[_Place]) -> None:
    check_levels([(place.value, place.parent) for place in places])


def _check_bounds(places: list[_Place], findings: Findings) -> None:
    check_bounds([place.value for place in places if isinstance(place.value, dict)], findings)


def _copy(schema: object) -> dict[str, object]:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False, default=dict)
        if len(text) > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"a JSON schema must be at most {MAX_GRAMMAR_BYTES} bytes long, this one has {len(text)}"
            )
        copied = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise GrammarError(_TOO_DEEP) from None
    except GrammarError:
        raise
    except (ValueError, TypeError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(copied, (bool, dict)):
        raise GrammarError("a JSON schema must be an object or a boolean")
    if copied is False:
        raise GrammarError("no output can match the JSON schema false")
    return {} if copied is True else copied


def _refuse_constant(name: str) -> object:
    raise GrammarError(f"the JSON schema is not JSON: {name}")


def _places(root: dict[str, object]) -> list[_Place]:
    """All objects and arrays of the schema, holders before what they hold."""
    places = [_Place(root, _Kind.SCHEMA, -1, 1)]
    for index, place in enumerate(places):  # grows meanwhile
        if place.depth > MAX_DEPTH:
            raise GrammarError(_TOO_DEEP)
        for key, child in _items(place.value):
            if isinstance(child, (dict, list)):
                places.append(_Place(child, _kind(place, key), index, place.depth + 1))
    return places


def _items(value: dict[str, object] | list[object]) -> Iterator[tuple[str | None, object]]:
    return iter(value.items()) if isinstance(value, dict) else ((None, item) for item in value)


def _kind(holder: _Place, key: str | None) -> _Kind:
    if holder.kind is _Kind.SCHEMA and key in _MAPS:
        return _Kind.MAP
    if holder.kind is _Kind.DATA or (holder.kind is _Kind.SCHEMA and key in _DATA):
        return _Kind.DATA
    return _Kind.SCHEMA
