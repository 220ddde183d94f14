"""Rules for arguments that stand between tags: one for each property, in the order of the schema."""

import json

from proa.grammar import GrammarError
from proa_gateway.parsing.json_rules import JsonRules
from proa_gateway.parsing.lark_rules import ANY
from proa_gateway.parsing.object_schema import Property, properties, with_definitions
from proa_gateway.parsing.schema_types import Schema, allowed_types, is_text
from proa_gateway.parsing.string_grammar import text_terminal
from proa_gateway.parsing.tags import Tags

_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def tagged_arguments(template: str, parameters: Schema, rules: JsonRules) -> str:
    lowering = _TaggedArguments(template, parameters, rules)
    named = properties(parameters)
    if named is None:
        return f"({lowering.any_item()})*"
    return " ".join(filter(None, map(lowering.item, named)))


class _TaggedArguments:
    def __init__(self, template: str, parameters: Schema, rules: JsonRules) -> None:
        self._tags = Tags.of(template)
        self._parameters = parameters
        self._rules = rules
        before_value, _, self._after_value = template.partition("$value")
        self._before_key, _, self._before_value = before_value.partition("$key")

    def item(self, argument: Property) -> str:
        if any(mark and mark in argument.name for mark in (self._tags.after_key, self._tags.header_end)):
            raise GrammarError(f"the name {argument.name[:50]!r} is not supported in this format of tool calls")
        types = allowed_types(argument.schema, self._parameters)
        begin = f"{self._before_key}{argument.name}{self._header(types)}"
        item = f"{self._rules.literal(begin)} {self._value(argument.schema, types)}"
        return self._rules.rule(item) + ("" if argument.is_required else "?")

    def any_item(self) -> str:
        begin, end = self._rules.literal(self._before_key), self._rules.literal(self._header(frozenset({"string"})))
        return f"{begin} {_ANY_KEY} {end} {self._text(ANY)}"

    def _header(self, types: frozenset[str]) -> str:
        return self._before_value.replace("$is_string", json.dumps(types == {"string"}))

    def _value(self, schema: Schema, types: frozenset[str]) -> str:
        if not is_text(types) or ("$is_string" in self._before_value and types != {"string"}):
            value = self._rules.json(with_definitions(schema, self._parameters))
            return f"{value} {self._rules.literal(self._after_value)}"
        return self._text(text_terminal(schema, self._parameters, strict=self._rules.strict))

    def _text(self, text: str) -> str:
        close = self._tags.close
        after = self._after_value.partition(close)[2]
        ended = self._rules.text_until(close, text, self._tags.after_value)
        return f"{ended} {self._rules.literal(after)}" if after else ended
