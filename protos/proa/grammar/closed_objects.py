"""close_objects: an object whose schema has `properties` and no `additionalProperties` gets no other properties.

JSON Schema allows any others, and small models write them: a name that resembles the wanted one, in place of it.
OpenAI's strict schemas allow none, nor does xgrammar, with which vLLM and SGLang enforce schemas.

Schemas that apply to one value together (`properties` beside `allOf`, `anyOf`, `oneOf` or `$ref`) are closed together,
as `unevaluatedProperties: false` would, which llguidance 1.9.1 does not support: each alternative allows its own
properties and those of the schemas beside it. Where `additionalProperties` cannot express that, objects stay open.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from proa.grammar.check import GrammarError
from proa.grammar.schema_bounds import resolve

Schema = dict[str, object]
Names = dict[str, None]  # of properties, in their order

MAX_VISITS = 200_000  # schemas visited and names added; takes about 0.1 s
_EXPLICIT = ("additionalProperties", "unevaluatedProperties", "const", "enum")  # say which properties there are


def close_objects(root: Schema, schemas: Sequence[Schema]) -> None:
    """Add `additionalProperties: false` in place. `schemas`: `root` and all schemas within it, with keywords of the
    right types. Raises `GrammarError` if they combine too many schemas."""
    closer = _Closer(root)
    parts = {id(part) for schema in schemas for part in chain(_all_of(schema), *_alternatives(schema))}
    for schema in schemas:
        if id(schema) not in parts:
            closer.plan(schema, {})
    closer.apply()


@dataclass(slots=True)
class _Closer:
    """Plans all schemas before it changes one: those that another schema combines with its own properties stay open."""

    root: Schema
    _closings: list[tuple[Schema, Names]] = field(default_factory=list)  # with the properties it allows
    _combined: set[int] = field(default_factory=set)  # ids of schemas that stay open
    _num_visits: int = 0

    def plan(self, schema: Schema, others: Names) -> None:
        """Plan to close a schema. `others`: properties that schemas beside it allow for the same value."""
        fixed = [each for each in self._fixed(schema) if self._declares(each)]
        alternatives = [each for each in _alternatives(schema) if any(map(self._declares, each))]
        if len(alternatives) == 1:
            self._plan_parts(schema, alternatives[0], others)
            self._keep_open(fixed)
        elif len(fixed) == 1 and not (alternatives or others or _declares(schema)):
            self._plan_only_part(schema, fixed[0])
        elif fixed or alternatives or others or _declares(schema):
            self._plan_closing(schema, others)

    def apply(self) -> None:
        for schema, allowed in self._closings:
            if id(schema) in self._combined:
                continue
            properties = _properties(schema)
            missing: Schema = {name: {} for name in allowed if name not in properties}
            if missing:
                schema["properties"] = properties | missing
            schema["additionalProperties"] = False

    def _plan_only_part(self, schema: Schema, part: Schema) -> None:
        if part is not self._target(schema):
            self._plan_parts(schema, [part], {})
        elif any(self._is_open(each) or "required" in each for each in self._reached(schema, without=[part])):
            self._plan_closing(schema, {})  # else it is closed where it is defined

    def _plan_parts(self, schema: Schema, parts: Sequence[Schema], others: Names) -> None:
        """Close each part by itself, so that an alternative does not allow the properties of another one."""
        beside = self._reached(schema, without=parts)
        if any(map(self._is_open, beside)):
            self._keep_open(parts)
            return
        for part in parts:
            self.plan(part, others | _names(beside))

    def _plan_closing(self, schema: Schema, others: Names) -> None:
        reached = self._reached(schema)
        self._keep_open([each for each in reached if each is not schema])
        allowed = others | _names(reached)
        is_known = not any(map(self._is_open, reached))
        if not is_known and len(reached) == 1 and not _is_explicit(schema):  # patternProperties allow others
            is_known = allowed.keys() <= _properties(schema).keys()
        if is_known and all(_min_properties(each) <= len(allowed) or "patternProperties" in each for each in reached):
            self._count(len(allowed))
            self._closings.append((schema, allowed))

    def _keep_open(self, schemas: Sequence[Schema]) -> None:
        self._combined.update(id(each) for schema in schemas for each in self._reached(schema))

    def _reached(self, schema: Schema, without: Sequence[Schema] = ()) -> list[Schema]:
        """The schema and all that apply to the same value through it, but for the parts `without`."""
        seen = {id(schema), *map(id, without)}
        reached = [schema]
        for each in reached:  # grows meanwhile
            for part in chain(self._fixed(each), *_alternatives(each)):
                if id(part) not in seen:
                    seen.add(id(part))
                    reached.append(part)
        self._count(len(reached))
        return reached

    def _count(self, visits: int) -> None:
        self._num_visits += visits
        if self._num_visits > MAX_VISITS:
            raise GrammarError("the JSON schema combines too many schemas by allOf, anyOf, oneOf and $ref")

    def _is_open(self, schema: Schema) -> bool:
        """Whether the properties that a schema allows cannot be listed by name."""
        leads_elsewhere = "$ref" in schema and self._target(schema) is None
        return leads_elsewhere or _is_explicit(schema) or "patternProperties" in schema

    def _declares(self, schema: Schema) -> bool:
        return any(map(_declares, self._reached(schema)))

    def _fixed(self, schema: Schema) -> list[Schema]:
        """The schemas that always apply together with this one."""
        target = self._target(schema)
        return _all_of(schema) if target is None else [*_all_of(schema), target]

    def _target(self, schema: Schema) -> Schema | None:
        reference = schema.get("$ref")
        target = resolve(self.root, reference) if isinstance(reference, str) else None
        return target if isinstance(target, dict) else None


def _all_of(schema: Schema) -> list[Schema]:
    return _dicts(schema.get("allOf"))


def _alternatives(schema: Schema) -> list[list[Schema]]:
    return [_dicts(schema.get("anyOf")), _dicts(schema.get("oneOf"))]


def _dicts(schemas: object) -> list[Schema]:
    return [each for each in schemas if isinstance(each, dict)] if isinstance(schemas, list) else []


def _declares(schema: Schema) -> bool:
    return "properties" in schema or "patternProperties" in schema


def _is_explicit(schema: Schema) -> bool:
    return any(keyword in schema for keyword in _EXPLICIT)


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _names(schemas: Sequence[Schema]) -> Names:
    required = (names for schema in schemas if isinstance(names := schema.get("required"), list))
    return dict.fromkeys(chain(*map(_properties, schemas), *required))


def _min_properties(schema: Schema) -> float:
    least = schema.get("minProperties")
    return least if isinstance(least, int | float) else 0
