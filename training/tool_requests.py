"""Requests that need a tool: the tool, the question, its calls, their results, the answer.

Names of tools and parameters, descriptions and the form of results vary, so that the network copies them from the
conversation. The key of a request's combination names what is copied from the question: cities, words, numbers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from training.talk import invented_name
from training.tools import Argument, Call, Tool
from training.turns import Exchange
from training.world import ANIMALS, COLOURS, COUNTRIES, NAMES, OPPOSITES, THINGS, plural

_ONSETS = (*"bcdfghjklmnprstvwz", "br", "ch", "cl", "fr", "gr", "kr", "pl", "sh", "st", "th", "tr", "")
_VOWELS = (*"aeiouy", *"aeiou", "ai", "ea", "ie", "oo", "ou")
_CODAS = (*"dklmnrst", "ng", "rk", "st", "nd", "ll", *("",) * 12)


@dataclass(frozen=True, slots=True)
class Request:
    """An exchange with calls, and the key of what they copy from the question."""

    exchange: Exchange
    combination: str


@dataclass(frozen=True, slots=True)
class Kind:
    """Tools that do the same under different names, and requests for such a tool."""

    tool: Callable[[Random], Tool]
    ask: Callable[[Random, Tool], Request]


def define(
    rng: Random,
    names: Sequence[str],
    descriptions: Sequence[str],
    parameters: Mapping[str, str | Mapping[str, object]],
    *,
    optional: Sequence[str] = (),
) -> Tool:
    """A tool with one of the names. `parameters`: the JSON type or the schema of each."""
    schemas = {name: {"type": schema} if isinstance(schema, str) else schema for name, schema in parameters.items()}
    required = tuple(name for name in parameters if name not in optional)
    description = rng.choice(descriptions) if rng.random() < 0.6 else None
    return Tool(rng.choice(names), description, schemas, required)


def request(question: str, tool: Tool, arguments: Sequence[Argument], result: str, answer: str, key: str) -> Request:
    """A request with one call, whose arguments are those of the tool's first parameters."""
    call = Call(tool.name, dict(zip(tool.parameters, arguments, strict=False)))
    return Request(Exchange(question, answer, (call,), (result,)), f"tool:{key}")


def one_value(rng: Random, names: Sequence[str], value: Argument) -> str:
    """A result of one value: a JSON object, or the value alone."""
    return json.dumps({rng.choice(names): value}) if rng.random() < 0.7 else str(value)


def done(rng: Random) -> str:
    return rng.choice(('{"status": "ok"}', '{"status": "done"}', '{"ok": true}', '{"success": true}', "ok", "done"))


def new_word(rng: Random) -> str:
    """A made-up word with a capital, of familiar syllables or of any letters."""
    if rng.random() < 0.6:
        return invented_name(rng)
    parts = (rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.randint(1, 2)))
    return "".join(parts).capitalize()


def place(rng: Random) -> str:
    name, prefix = new_word(rng), rng.choice(("New", "Port", "San", "Old"))
    return rng.choice((rng.choice(COUNTRIES).capital, name, name, f"{prefix} {name}"))


def person(rng: Random) -> str:
    first = rng.choice((rng.choice(NAMES), new_word(rng)))
    return f"{first} {new_word(rng)}" if rng.random() < 0.3 else first


def thing(rng: Random) -> str:
    """One to three words: "shells", "red lemons", "books from Chile"."""
    noun = rng.choice((rng.choice(THINGS), plural(rng.choice(ANIMALS).name), new_word(rng).lower()))
    colour = rng.choice(tuple(COLOURS.values()))
    adjective = rng.choice(tuple(OPPOSITES))
    other = rng.choice((plural(rng.choice(ANIMALS).name), new_word(rng), rng.choice(COUNTRIES).name))
    return rng.choice((noun, noun, f"{colour} {noun}", f"{adjective} {noun}", f"{noun} from {other}"))
