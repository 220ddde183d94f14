"""Request bodies that are as costly as one field allows: for each field of the API that is a list, a map or a text."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.minimal_bodies import ALIASES, MINIMAL
from support.thorough import THOROUGH

Schema = dict[str, Any]
Path = tuple[str, ...]  # of a field; "[]" stands for an element of a list, "{}" for a value of a map
MAX_BYTES = 16 * 2**20 - 1024
DEEPEST = 6
TEXTS = ("abcdefg ", "語", "\\") if THOROUGH else ("語",)


@dataclass(frozen=True, slots=True)
class Costly:
    """A request. `name`: of its field, and what that holds."""

    route: str
    name: str
    body: bytes

    def __str__(self) -> str:
        return f"{self.route} {self.name}"


def costly_bodies(document: Schema, max_bytes: int = MAX_BYTES) -> Iterator[Costly]:
    """For an OpenAPI document: bodies of at most `max_bytes`. A field that several routes have is in the first one's
    bodies, and so are fields of one name and type."""
    seen: set[tuple[str, str]] = set()
    schemas = document["components"]["schemas"]
    for route, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if route in ALIASES or "application/json" not in content:
            continue
        base = MINIMAL[route] | {"model": "fake"}
        schema = content["application/json"]["schema"]
        for path, kind, item in sorted(_fields(schema, schemas, (), 0), key=str):
            for name, value in _values(kind, item, schemas, max_bytes):
                field = next((part for part in reversed(path) if part != "[]"), ""), name
                if field in seen:
                    continue
                seen.add(field)
                yield Costly(route, f"{'.'.join(path)}: {name}", _encode(base, path, value))
        yield Costly(route, "unknown fields", json.dumps(base | {f"u{n}": 1 for n in range(40_000)}).encode())


def _fields(schema: Schema, schemas: Schema, path: Path, depth: int) -> Iterator[tuple[Path, str, Schema]]:
    """The paths of texts, lists and maps, with the kind and the schema of an element."""
    found: set[str] = set()
    for field in _all_fields(schema, schemas, path, depth, frozenset()):
        if str(field) not in found:
            found.add(str(field))
            yield field


def _all_fields(
    schema: Schema, schemas: Schema, path: Path, depth: int, seen: frozenset[str]
) -> Iterator[tuple[Path, str, Schema]]:
    if depth > DEEPEST:
        return
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name not in seen:
            yield from _all_fields(schemas[name], schemas, path, depth, seen | {name})
        return
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _all_fields(branch, schemas, path, depth, seen)
    kind = schema.get("type")
    if kind == "string" and "enum" not in schema and "const" not in schema:
        yield path, "text", {}
    elif kind == "array":
        yield path, "list", schema.get("items", {})
        yield from _all_fields(schema.get("items", {}), schemas, (*path, "[]"), depth + 1, seen)
    elif kind == "object":
        if path and schema.get("additionalProperties", True) is not False:
            extra = schema.get("additionalProperties", {})
            yield path, "map", extra if isinstance(extra, dict) else {}
        for name, field in schema.get("properties", {}).items():
            yield from _all_fields(field, schemas, (*path, name), depth + 1, seen)


def _values(kind: str, item: Schema, schemas: Schema, max_bytes: int) -> Iterator[tuple[str, str]]:
    """JSON texts of values, with a name for each."""
    if kind == "text":
        for text in TEXTS:
            encoded = json.dumps(text, ensure_ascii=False)[1:-1]
            yield f"text of {text!r}", '"' + encoded * (max_bytes // len(encoded.encode())) + '"'
        return
    for element in (*_elements(item, schemas), None):  # null is refused nearly everywhere
        encoded = json.dumps(element)
        if kind == "list":
            yield f"list of {encoded[:60]}", "[" + ",".join([encoded] * _count(element, max_bytes)) + "]"
            if isinstance(element, int):
                number = _count(element, max_bytes // 6)
                yield "list of different numbers", "[" + ",".join(map(str, range(number))) + "]"
            if isinstance(element, str):
                number = _count(element, max_bytes // 9)
                yield "list of different texts", json.dumps([f"t{each}" for each in range(number)])
        else:
            number = min(690_000 // (17 + _cost(element)), max_bytes // (len(encoded) + 12))
            yield f"map to {encoded[:60]}", json.dumps(dict.fromkeys(map(str, range(number)), element))


def _count(element: Any, max_bytes: int) -> int:
    """How many elements a body may have."""
    encoded = json.dumps(element)
    return min(max_bytes // (len(encoded) + 1), 690_000 // (1 + _cost(element)))


def _cost(value: Any) -> int:
    """As `proa_gateway.http.bodies` counts."""
    if isinstance(value, dict):
        return 30 + 17 * len(value) + sum(map(_cost, value.values()))
    if isinstance(value, list):
        return 12 + len(value) + sum(map(_cost, value))
    return 4 if isinstance(value, str) else 0


def _elements(schema: Schema, schemas: Schema, depth: int = 0) -> Iterator[Any]:
    """The smallest values of each kind that a schema allows."""
    if depth > DEEPEST:
        return
    if "$ref" in schema:
        yield from _elements(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas, depth + 1)
        return
    if branches := (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        for branch in branches:
            yield from _elements(branch, schemas, depth + 1)
        return
    if "const" in schema or "enum" in schema:
        yield schema.get("const", (schema.get("enum") or [None])[0])
        return
    kind = schema.get("type")
    if kind == "string":
        yield "a" if schema.get("pattern") is None or "a-z" in schema["pattern"] else "0"
    elif kind in ("integer", "number"):
        yield int(schema.get("minimum", 5)) or 5
    elif kind == "boolean":
        yield True
    elif kind == "array":
        yield from ([each] for each in list(_elements(schema.get("items", {}), schemas, depth + 1))[:2])
    elif kind == "object":
        required = schema.get("required", [])
        fields = {name: list(_elements(schema["properties"][name], schemas, depth + 1)) for name in required}
        if all(fields.values()):
            yield {name: values[0] for name, values in fields.items()}
    elif kind is None:
        yield 5


def _encode(base: dict[str, Any], path: Path, value: str) -> bytes:
    """The base with the value at a path, whose lists and objects are made where the base has none."""
    marker = "\0value\0"
    if not path:
        return value.encode()
    body = {**base, path[0]: _at(base.get(path[0]), path[1:], marker)}
    return json.dumps(body).replace(json.dumps(marker), value).encode()


def _at(base: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    head, *rest = path
    if head == "[]":
        inner = base[0] if isinstance(base, list) and base else None
        return [_at(inner, tuple(rest), value)]
    fields = base if isinstance(base, dict) else {}
    return {**fields, head: _at(fields.get(head), tuple(rest), value)}
