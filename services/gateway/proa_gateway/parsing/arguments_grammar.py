"""Rules for the arguments of one tool, in the syntax of a format."""

from collections.abc import Mapping

from proa.grammar import GrammarError, check
from proa.grammar.lark import AddedTokens
from proa_gateway.parsing.format import ArgumentsSyntax, Envelope, Json, ObjectLiteral, PythonCall, Tagged
from proa_gateway.parsing.json_rules import JsonRules
from proa_gateway.parsing.object_grammar import ObjectArguments
from proa_gateway.parsing.python_grammar import python_arguments
from proa_gateway.parsing.schema_types import Schema
from proa_gateway.parsing.tagged_grammar import tagged_arguments
from proa_gateway.parsing.tool import FunctionTool

_ANY: Schema = {"type": "object", "additionalProperties": True}


def arguments_rules(
    syntax: ArgumentsSyntax, tool: FunctionTool, added_tokens: AddedTokens, prefix: str
) -> tuple[str, list[str]]:
    """An expression for the arguments, and the rules that it needs, whose names begin with `prefix`.

    If the schema cannot be held: raises `GrammarError` for a strict tool, else takes any arguments.
    """
    rules = JsonRules(added_tokens, prefix, strict=tool.strict)
    try:
        expression = _lower(syntax, _object_schema(tool.parameters), rules)
        check(rules.grammar(expression or '""'))
    except GrammarError as error:
        if tool.strict:
            raise GrammarError(f"tool {tool.name!r} with strict: {error}") from None
        rules = JsonRules(added_tokens, prefix, strict=False)
        expression = _lower(syntax, _ANY, rules)
    return expression, rules.lines


def _object_schema(parameters: Mapping[str, object]) -> Schema:
    if parameters.get("type", "object") != "object":
        raise GrammarError("the type of its parameters must be object")
    return {"type": "object", **parameters}


def _lower(syntax: ArgumentsSyntax, parameters: Schema, rules: JsonRules) -> str:
    match syntax:
        case Json() | Envelope():
            return rules.json(parameters)
        case Tagged(template=template):
            return tagged_arguments(template, parameters, rules)
        case PythonCall():
            return python_arguments(parameters, rules)
        case ObjectLiteral(quote=quote):
            return ObjectArguments(quote, parameters, rules).lower()
