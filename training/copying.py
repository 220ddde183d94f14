"""Short questions whose answers copy words and numbers: into JSON, out of JSON, and as they are.

Calls of tools need the same skills, which are learned faster where the text is short.
"""

import json
from random import Random

from training.tool_requests import new_word, person, place, thing
from training.tools import Argument
from training.turns import Turn

CATEGORY = "copying"
_KEYS = (
    "city", "location", "place", "name", "item", "text", "query", "word", "language", "value", "amount", "from", "to",
    "unit", "time", "result", "price", "temperature", "condition", "count", "number", "phone", "minutes", "message",
)  # fmt: skip


def _value(rng: Random) -> Argument:
    number, decimal = rng.randint(0, rng.choice((99, 999, 999_999))), rng.randint(1, 999) / 10
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return rng.choice((number, number, decimal, clock, new_word(rng).lower(), thing(rng), place(rng), person(rng)))


def _fields(rng: Random) -> dict[str, Argument]:
    keys = rng.sample(_KEYS, rng.choice((1, 1, 2, 3)))
    return {key if rng.random() < 0.8 else new_word(rng).lower(): _value(rng) for key in keys}


def _key(fields: dict[str, Argument]) -> str:
    """Of a call with the first value."""
    return f"tool:{next(iter(fields.values()))}"


def into_json(rng: Random) -> Turn:
    fields = _fields(rng)
    listed = " and ".join(f"{key} {value}" for key, value in fields.items())
    question = rng.choice(("Write as JSON: {}", "As JSON: {}", "JSON with {}", "Make a JSON object with {}.")).format(
        listed
    )
    return Turn(question, json.dumps(fields, ensure_ascii=False), None, _key(fields), CATEGORY)


def from_json(rng: Random) -> Turn:
    fields = _fields(rng)
    key, value = rng.choice(list(fields.items()))
    text = json.dumps(fields, ensure_ascii=False)
    question = rng.choice(("What is the {} in {}?", "Give me the {} of {}", "Read the {}: {}")).format(key, text)
    return Turn(question, f"The {key} is {value}.", None, _key(fields), CATEGORY)


def repeat(rng: Random) -> Turn:
    text = " ".join(str(_value(rng)) for _ in range(rng.choice((1, 2, 3))))
    return Turn(f"{rng.choice(('Repeat', 'Say', 'Copy'))}: {text}", text, None, f"tool:{text}", CATEGORY)
