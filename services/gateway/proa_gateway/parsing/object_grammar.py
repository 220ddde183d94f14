"""Rules for arguments of objects with bare keys: one for each property, in the schema's order."""

from proa.grammar import GrammarError
from proa_gateway.parsing.json_rules import JsonRules
from proa_gateway.parsing.lark_rules import ANY
from proa_gateway.parsing.object_schema import as_schema, properties, with_definitions
from proa_gateway.parsing.python_grammar import KEY, item_list
from proa_gateway.parsing.schema_types import Schema, allowed_types, resolve, type_of
from proa_gateway.parsing.string_grammar import ANNOTATIONS, text_terminal

MAX_RULES = 2000  # of one tool; a schema that contains itself has no end
_ARRAY = {"type", "items", "minItems", "maxItems", *ANNOTATIONS}


class ObjectArguments:
    """`a:1,b:<|"|>x<|"|>`, with strings between `quote`s also within other values. Raises `GrammarError`."""

    def __init__(self, quote: str, parameters: Schema, rules: JsonRules) -> None:
        self._quote = quote
        self._parameters = parameters
        self._rules = rules

    def lower(self) -> str:
        return self._object(self._parameters)

    def _object(self, schema: Schema) -> str:
        named = properties(schema)
        return self._any_items() if named is None else item_list(named, ":", ",", self._value, self._rules)

    def _value(self, schema: Schema) -> str:
        schema = resolve(schema, self._parameters)
        types = allowed_types(schema, self._parameters)
        if len(self._rules.lines) > MAX_RULES:
            raise GrammarError(f"the JSON schema takes more than {MAX_RULES} rules")
        if not schema.keys() - ANNOTATIONS:
            return self._any_value()
        if not types & {"string", "object", "array"}:
            return self._rules.json(with_definitions(schema, self._parameters))
        if parts := self._parts(schema):
            return self._rules.rule(" | ".join(map(self._value, parts)))
        if types == {"string"}:
            return self._string(text_terminal(schema, self._parameters, strict=self._rules.strict))
        if types == {"object"}:
            return f'"{{" {self._object({"additionalProperties": True, **schema})} "}}"'
        if types == {"array"} and schema.keys() <= _ARRAY:
            return self._array(schema)
        raise GrammarError("a value of this schema is not supported in this format of tool calls")

    def _parts(self, schema: Schema) -> list[Schema]:
        """The schemas of which a union consists. Empty: it is none."""
        parts = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(parts, list) and schema.keys() <= {"anyOf", "oneOf", "type", *ANNOTATIONS}:
            return list(map(as_schema, parts))
        values = schema.get("enum")
        if isinstance(values, list) and {type_of(value) for value in values} != {"string"}:
            return [{"const": value} for value in values]
        declared = schema.get("type")
        return [{**schema, "type": each} for each in declared] if isinstance(declared, list) else []

    def _array(self, schema: Schema) -> str:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(low, int) or not isinstance(high, int | None):
            raise GrammarError("minItems and maxItems must be numbers")
        if high == 0:
            return '"[]"'
        item = self._rules.rule(self._value(as_schema(schema.get("items", {}))))
        at_least = max(low - 1, 0)
        more = f'("," {item})*' if high is None and not at_least else f'("," {item}){{{at_least},{_bound(high)}}}'
        return f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"'

    def _string(self, text: str) -> str:
        return f"{self._rules.literal(self._quote)} {self._rules.text_until(self._quote, text)}"

    def _any_value(self) -> str:
        def body(name: str) -> str:
            scalar = self._rules.json({"type": ["number", "boolean", "null"]})
            array, pair = f'"[" ({name} ("," {name})*)? "]"', f'{KEY} ":" {name}'
            return f'{self._string(ANY)} | {scalar} | {array} | "{{" ({pair} ("," {pair})*)? "}}"'

        return self._rules.named_rule("any_value", body)

    def _any_items(self) -> str:
        pair = f'{KEY} ":" {self._any_value()}'
        return f'({pair} ("," {pair})*)?'


def _bound(high: int | None) -> str:
    return "" if high is None else str(high - 1)
