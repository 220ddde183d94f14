"""Custom tools: tools whose calls have a text as input, which may have to match a grammar.

For the model a custom tool is a function with one argument, `input`. Open models were not trained on tools with
grammars, so its description ends with the grammar.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from proa_gateway.parsing.format import INPUT, INPUT_SCHEMA, TextGrammar
from proa_gateway.parsing.json_text import quoted
from proa_gateway.serving.fields import Text, known_types

_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


class AnyText(BaseModel):
    type: Literal["text"]


class GrammarDefinition(BaseModel):
    """`regex`: a regular expression that matches all of the input."""

    syntax: Literal["lark", "regex"]
    definition: Text


class GrammarFormat(BaseModel):
    """In chat completions."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


class FlatGrammarFormat(GrammarDefinition):
    """In responses."""

    type: Literal["grammar"]


ChatInputFormat = Annotated[
    Annotated[AnyText | GrammarFormat, Field(discriminator="type")], known_types("text", "grammar")
]
InputFormat = Annotated[
    Annotated[AnyText | FlatGrammarFormat, Field(discriminator="type")], known_types("text", "grammar")
]


def grammar_of(input_format: AnyText | GrammarFormat | FlatGrammarFormat | None) -> TextGrammar | None:
    """None: any text."""
    match input_format:
        case GrammarFormat(grammar=grammar):
            return TextGrammar(grammar.syntax, grammar.definition)
        case FlatGrammarFormat(syntax=syntax, definition=definition):
            return TextGrammar(syntax, definition)
    return None


def function_fields(name: str, description: str | None, grammar: TextGrammar | None) -> dict[str, Any]:
    """The function that a custom tool is for the model."""
    parts = [description] if description else []
    if grammar is not None:
        parts.append(f"The {INPUT} must match this {_SYNTAXES[grammar.syntax]}:\n{grammar.definition.strip()}")
    described: Mapping[str, object] = {"description": "\n\n".join(parts)} if parts else {}
    return {"name": name, **described, "parameters": INPUT_SCHEMA}


def call_arguments(text: str) -> str:
    """The arguments of the function that a custom tool is, as JSON text."""
    return f'{{"{INPUT}": {quoted(text)}}}'
