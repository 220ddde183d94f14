"""ArgumentsReader: turns the arguments of a call into JSON, in the syntax of a format."""

from collections.abc import Mapping
from typing import Protocol

from proa_gateway.parsing.format import Json, ObjectLiteral, PythonCall, Tagged
from proa_gateway.parsing.json_text import JsonScanner
from proa_gateway.parsing.literal_reader import LiteralReader, LiteralSyntax
from proa_gateway.parsing.tagged_reader import TaggedReader, Tags


class ArgumentsReader(Protocol):
    """Turns the text of one call's arguments into JSON as it comes, without reading any of it twice."""

    @property
    def is_complete(self) -> bool:
        """Whether the arguments have ended."""
        ...

    @property
    def rest(self) -> str:
        """Text after the end of the arguments, once they are complete."""
        ...

    def feed(self, text: str) -> str:
        """Read more text. Returns the JSON text of the arguments that is certain now, possibly none."""
        ...

    def close(self, *, by_model: bool) -> str:
        """The call ends here, complete or not. Returns what is left to be sent. `by_model`: the model has closed the
        call; otherwise the output ends, and what it has not ended stays open."""
        ...


class JsonReader:
    """An `ArgumentsReader`. Arguments that are no object are taken for text after the call."""

    __slots__ = ("_begun", "is_complete", "rest", "scanner")

    def __init__(self) -> None:
        self.scanner = JsonScanner()
        self._begun = False  # something else than whitespace has come
        self.is_complete = False
        self.rest = ""

    def feed(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            if not text:
                return ""
            self._begun = True
            if text[0] != "{":
                self.is_complete, self.rest = True, text
                return ""
        end = self.scanner.scan(text)
        if self.scanner.is_complete:
            self.is_complete, self.rest = True, text[end:]
        return text[:end]

    def close(self, *, by_model: bool) -> str:
        return ""


def arguments_reader(
    syntax: Json | Tagged | ObjectLiteral | PythonCall, schema: Mapping[str, object]
) -> ArgumentsReader:
    """A reader for one call. `schema`: of the tool's parameters; {} if the tool is not known."""
    match syntax:
        case Json():
            return JsonReader()
        case Tagged():
            return TaggedReader(Tags.of(syntax), schema)
        case ObjectLiteral(quote):
            return LiteralReader(LiteralSyntax(raw_quote=quote))
        case PythonCall():
            return LiteralReader(LiteralSyntax(separator="="))
