"""Rules for the arguments of one tool, in the syntax of a format: JSON, tags, Python calls, objects with bare keys."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from proa.grammar import GrammarError, check, check_complexity
from proa.grammar.json_schema import supported_schema
from proa.grammar.lark import AddedTokens
from proa.grammar.schema_bounds import Findings
from proa.grammar.schema_forms import InvalidSchema
from proa_gateway.parsing.format import (
    INPUT,
    ArgumentsSyntax,
    CallObject,
    FunctionTool,
    Json,
    ObjectLiteral,
    PythonCall,
    Tagged,
)
from proa_gateway.parsing.grammars.rules import ANNOTATIONS, ANY, JsonRules, text_terminal
from proa_gateway.parsing.grammars.text_input import TextRules
from proa_gateway.parsing.schema_types import OF_NUMBERS, Schema, allowed_types, is_text, of_type, resolve, type_of
from proa_gateway.parsing.tagged_reader import Tags

_DEFINITIONS = ("$defs", "definitions")
_KNOWN = {"type", "properties", "required", "additionalProperties", "$schema", "$id", *_DEFINITIONS, *ANNOTATIONS}
KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
MAX_RULES = 2000  # of one tool; a schema that contains itself has no end
_ARRAY = {"type", "items", "minItems", "maxItems", *ANNOTATIONS}
_PLAIN = "/[^<]*/"  # a text that begins no tag
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_ANY: Schema = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class ArgumentsRules:
    """What a grammar has of one tool's arguments: an expression for them, and the rules that it needs."""

    expression: str
    lines: Sequence[str]
    warnings: Sequence[str] = ()  # for the client: what of the schema the grammar does not hold


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    schema: Schema
    is_required: bool


def properties(schema: Schema) -> list[Property] | None:
    """Return the properties in the schema's order, then those that are required and have no schema. None: any may be
    there. Properties that the schema allows without a name are left out if others have one. Raises `GrammarError` for
    what a list cannot express."""
    for keyword in schema:
        if keyword not in _KNOWN:
            raise GrammarError(f"{keyword} is not supported for an object in this format of tool calls")
    named = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(named, Mapping) or not isinstance(required, list):
        raise GrammarError("properties must be an object, required an array")
    others = schema.get("additionalProperties", False)
    if not named and not required and others is not False:
        if others not in (True, {}):
            raise GrammarError("additionalProperties with a schema is not supported in this format of tool calls")
        return None
    all_schemas = {**named, **{name: others for name in required if name not in named}}
    return [
        Property(name, as_schema(value), name in required)
        for name, value in all_schemas.items()
        if value is not False or name in required
    ]


def as_schema(schema: object) -> Schema:
    if schema is False:
        raise GrammarError("no value can match the JSON schema false")
    return schema if isinstance(schema, Mapping) else {}


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """The schema with what its references lead to."""
    return {**{name: root[name] for name in _DEFINITIONS if name in root}, **schema}


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
        return [_of_type(schema, each) for each in declared] if isinstance(declared, list) else []

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


def _of_type(schema: Schema, name: object) -> Schema:
    """The schema with one type, and without what it says about numbers if that is another one."""
    left_out = frozenset() if name in ("number", "integer") else OF_NUMBERS
    return {keyword: value for keyword, value in schema.items() if keyword not in left_out} | {"type": name}


def _bound(high: int | None) -> str:
    return "" if high is None else str(high - 1)


def tagged_arguments(syntax: Tagged, parameters: Schema, rules: JsonRules) -> str:
    lowering = _TaggedArguments(syntax, parameters, rules)
    named = properties(parameters)
    if named is None:
        return f"({lowering.any_item()})*"
    return " ".join(filter(None, map(lowering.item, named)))


class _TaggedArguments:
    def __init__(self, syntax: Tagged, parameters: Schema, rules: JsonRules) -> None:
        self._tags = Tags.of(syntax)
        self._parameters = parameters
        self._rules = rules
        before_value, _, self._after_value = syntax.template.partition("$value")
        self._before_key, _, self._before_value = before_value.partition("$key")

    def item(self, argument: Property) -> str:
        if any(mark and mark in argument.name for mark in (self._tags.after_key, self._tags.header_end)):
            raise GrammarError(f"the name {argument.name[:50]!r} is not supported in this format of tool calls")
        items = [self._item(part) for part in self._parts(argument)]
        return self._rules.rule(" | ".join(items)) + ("" if argument.is_required else "?")

    def _parts(self, argument: Property) -> list[Property]:
        """The argument, or one for each type that it may have where the model writes the type."""
        types = allowed_types(argument.schema, self._parameters)
        if "$type" not in self._before_value or len(types) == 1:
            return [argument]
        names = sorted(types - {"integer"} if "number" in types else types)
        return [replace(argument, schema=of_type(argument.schema, name, self._parameters)) for name in names]

    def _item(self, argument: Property) -> str:
        types = allowed_types(argument.schema, self._parameters)
        begin = f"{self._before_key}{argument.name}{self._header(types)}"
        return f"{self._rules.literal(begin)} {self._value(argument, types)}"

    def text_item(self, name: str, text: TextRules) -> str:
        """The item of a string that matches `text`."""
        begin = self._rules.literal(f"{self._before_key}{name}{self._header(frozenset({'string'}))}")
        close, whitespace = self._tags.close_of(name), self._tags.after_value
        after = self._after(name).partition(close)[2]
        if self._tags.quotes is None:
            ended = text.raw(close, whitespace)
        else:
            opening, closing = self._tags.quotes
            plain = text.raw(close, whitespace, not_first=opening)
            ended = f"({self._rules.literal(opening)} {text.raw(closing + close, whitespace)} | {plain})"
        return f"{begin} {ended} {self._rules.literal(after)}" if after else f"{begin} {ended}"

    def any_item(self) -> str:
        begin, end = self._rules.literal(self._before_key), self._rules.literal(self._header(frozenset({"string"})))
        before, is_key, after = self._after_value.partition("$key")
        if is_key:  # no grammar of this kind can demand the same key again
            ended = self._rules.text_until(before)
            return f"{begin} {_ANY_KEY} {end} {ended} {_ANY_KEY} {self._rules.literal(after)}"
        return f"{begin} {_ANY_KEY} {end} {self._text(ANY, '')}"

    def _header(self, types: frozenset[str]) -> str:
        header = self._before_value.replace("$is_string", json.dumps(types == {"string"}))
        if "$type" not in header:
            return header
        name = next(iter(types)) if len(types) == 1 else "number"
        return header.replace("$type", "number" if name == "integer" else name)

    def _value(self, argument: Property, types: frozenset[str]) -> str:
        if not is_text(types) or ("$is_string" in self._before_value and types != {"string"}):
            value = self._rules.json(with_definitions(argument.schema, self._parameters))
            return f"{value} {self._rules.literal(self._after(argument.name))}"
        try:
            text = text_terminal(argument.schema, self._parameters, strict=self._rules.strict)
        except GrammarError as error:
            self._rules.leave_out(f"$.{argument.name}", error)
            text = ANY
        return self._text(text, argument.name)

    def _text(self, text: str, name: str) -> str:
        if (quotes := self._tags.quotes) is None:
            return self._text_until_close(text, name)
        opening, closing = quotes
        quoted = f"{self._rules.literal(opening)} {self._text_until_close(text, name, closing)}"
        if text != ANY:  # it may have only values that need quotes
            return f"({quoted} | {self._text_until_close(text, name)})"
        return f"({quoted} | {self._text_until_close(_PLAIN, name)})"

    def _text_until_close(self, text: str, name: str, closing: str = "") -> str:
        close = self._tags.close_of(name)
        after = self._after(name).partition(close)[2]
        ended = self._rules.text_until(closing + close, text, self._tags.after_value)
        return f"{ended} {self._rules.literal(after)}" if after else ended

    def _after(self, name: str) -> str:
        return self._after_value.replace("$key", name)


def arguments_rules(
    syntax: ArgumentsSyntax, tool: FunctionTool, added_tokens: AddedTokens, prefix: str, *, is_demanded: bool
) -> ArgumentsRules:
    """`prefix`: of the rules' names. `is_demanded`: the output must be a call.

    What of the schema cannot be held: raises `GrammarError` for a strict tool, else leaves it free. What is no JSON
    schema: raises `GrammarError` if a call is demanded, too. A tool that is only offered may have one, because models
    also read such schemas. The grammar of an input is held, or raises `GrammarError`.
    """
    findings = Findings()
    rules = JsonRules(added_tokens, prefix, findings, strict=tool.strict)
    if tool.text is not None:
        try:
            expression = _lower_input(syntax, TextRules(tool.text, rules), rules)
            text = rules.grammar(expression)
            check_complexity(text)
            check(text)
        except GrammarError as error:
            raise GrammarError(f"tool {tool.name!r}: {error}") from None
        return ArgumentsRules(expression, rules.lines)
    try:
        parameters = supported_schema(_object_schema(tool.parameters), findings, strict=tool.strict)
        expression = _lower(syntax, parameters, rules)
        check(rules.grammar(expression or '""'))
        warnings = [f"tool {tool.name!r}: {warning}" for warning in findings.warnings]
    except GrammarError as error:
        if tool.strict:
            raise GrammarError(f"tool {tool.name!r} with strict: {error}") from None
        if is_demanded and isinstance(error, InvalidSchema):
            raise GrammarError(f"tool {tool.name!r} has an invalid 'parameters' schema: {error}") from None
        rules = JsonRules(added_tokens, prefix, Findings(), strict=False)
        expression = _lower(syntax, _ANY, rules)
        warnings = [f"tool {tool.name!r} may get any arguments: {error}"]
    return ArgumentsRules(expression, rules.lines, warnings)


def _object_schema(parameters: Mapping[str, object]) -> Schema:
    if parameters.get("type", "object") != "object":
        raise GrammarError("the type of its parameters must be object")
    return {"type": "object", **parameters}


def _lower(syntax: ArgumentsSyntax, parameters: Schema, rules: JsonRules) -> str:
    match syntax:
        case Json() | CallObject():
            return rules.json(parameters)
        case Tagged():
            return tagged_arguments(syntax, parameters, rules)
        case PythonCall():
            return python_arguments(parameters, rules)
        case ObjectLiteral(quote=quote):
            return ObjectArguments(quote, parameters, rules).lower()


def _lower_input(syntax: ArgumentsSyntax, text: TextRules, rules: JsonRules) -> str:
    """The arguments of a custom tool, which are its input."""
    match syntax:
        case Json() | CallObject():
            begin, ended = f'{{"{INPUT}": "', text.in_json('"}')
        case Tagged():
            return _TaggedArguments(syntax, {}, rules).text_item(INPUT, text)
        case PythonCall():
            begin, ended = f'{INPUT}="', text.in_json('"')
        case ObjectLiteral(quote=quote):
            begin, ended = f"{INPUT}:{quote}", text.raw(quote)
    return f"{rules.literal(begin)} {ended}"
