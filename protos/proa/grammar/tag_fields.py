"""Fields of structural tags, which are JSON of a client, with their types."""

from collections.abc import Mapping

from proa.grammar.check import GrammarError

Format = Mapping[str, object]


def refuse(form: Format, known: set[str], kind: str) -> None:
    for name, value in form.items():
        if name not in known and value not in (None, False, [], ""):
            raise GrammarError(f"structural_tag: {name[:50]} of {kind} is not supported")


def string(form: Format, name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise GrammarError(f"structural_tag: {name} must be a string")
    return value


def strings(form: Format, name: str) -> list[str]:
    values = form.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
        raise GrammarError(f"structural_tag: {name} must be an array of strings that are not empty")
    return values


def object_(form: Format, name: str) -> Format:
    value = form.get(name)
    if not isinstance(value, Mapping):
        raise GrammarError(f"structural_tag: {name} must be an object")
    return value


def objects(form: Format, name: str) -> list[Format]:
    values = form.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, Mapping) for value in values):
        raise GrammarError(f"structural_tag: {name} must be an array of objects")
    return values
