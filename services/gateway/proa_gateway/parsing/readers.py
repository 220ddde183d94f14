"""The reader of each syntax of arguments."""

from collections.abc import Mapping

from proa_gateway.parsing.format import Json, ObjectLiteral, PythonCall, Tagged
from proa_gateway.parsing.json_reader import JsonReader
from proa_gateway.parsing.literal_reader import LiteralReader, LiteralSyntax
from proa_gateway.parsing.reader import ArgumentsReader
from proa_gateway.parsing.tagged_reader import TaggedReader
from proa_gateway.parsing.tags import Tags


def arguments_reader(
    syntax: Json | Tagged | ObjectLiteral | PythonCall, schema: Mapping[str, object]
) -> ArgumentsReader:
    """A reader for one call. `schema`: of the tool's parameters; {} if the tool is not known."""
    match syntax:
        case Json():
            return JsonReader()
        case Tagged(template):
            return TaggedReader(Tags.of(template), schema)
        case ObjectLiteral(quote):
            return LiteralReader(LiteralSyntax(raw_quote=quote))
        case PythonCall():
            return LiteralReader(LiteralSyntax(separator="="))
