"""Rules for arguments of Python calls: one for each property, in the schema's order."""

import re
from collections.abc import Callable, Sequence

from proa.grammar import GrammarError
from proa_gateway.parsing.json_rules import JsonRules
from proa_gateway.parsing.object_schema import Property, properties, with_definitions
from proa_gateway.parsing.schema_types import Schema, allowed_types

KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def python_arguments(parameters: Schema, rules: JsonRules) -> str:
    """`a=1, b="x"`: JSON, but Python's True, False and None outside of other values."""

    def value(schema: Schema) -> str:
        types = allowed_types(schema, parameters)
        if types == {"boolean"} and not schema.keys() & {"enum", "const"}:
            return '("True" | "False")'
        return '"None"' if types == {"null"} else rules.json(with_definitions(schema, parameters))

    named = properties(parameters)
    if named is None:
        item = rules.rule(f'{KEY} "=" {rules.json({})}')
        return f'({item} (", " {item})*)?'
    return item_list(named, "=", ", ", value, rules)


def item_list(
    named: Sequence[Property], separator: str, comma: str, value: Callable[[Schema], str], rules: JsonRules
) -> str:
    """A list of the properties, of which optional ones may be left out, with commas between those that are there."""
    first = rest = '""'  # the list from one property on; `rest` if others stand before
    for argument in reversed(named):
        if not _IDENTIFIER.fullmatch(argument.name):
            raise GrammarError(f"the name {argument.name[:50]!r} is not supported in this format of tool calls")
        item = rules.rule(f"{rules.literal(argument.name + separator)} {value(argument.schema)}")
        after = f"{rules.literal(comma)} {item}"
        begin = f"{item} {rest}"
        first = rules.rule(begin if argument.is_required else f"{begin} | {first}")
        rest = rules.rule(f"{after} {rest}" if argument.is_required else f"({after})? {rest}")
    return first
