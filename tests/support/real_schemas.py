"""JSON schemas as applications send them, each with a question. Strings and arrays are bounded, as a small model may
repeat itself in them for ever."""

from typing import Any

Schema = dict[str, Any]


def text(most: int = 24, **more: Any) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": most, **more}


def whole(least: int = 0, most: int = 1000) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def listed(items: Schema, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def fields(**properties: Schema) -> Schema:
    """An object with all of these properties and no others, as strict schemas of OpenAI's are."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_ADDRESS: Schema = fields(street=text(), city=text(16), zip=text(10, pattern="^[0-9]{5}$"))

SCHEMAS: tuple[tuple[str, Schema], ...] = (
    ("Who wrote Hamlet?", fields(author=text(), confident={"type": "boolean"})),
    ("Describe a person called Ann who is 31.", fields(name=text(12), age=whole(0, 130))),
    ("Is this review good or bad? 'I loved it.'", fields(sentiment={"enum": ["positive", "negative", "neutral"]})),
    ("List three colors.", fields(colors=listed(text(10)))),
    ("Give a recipe for pancakes.", fields(title=text(), steps=listed(text(40)), minutes=whole(1, 90))),
    ("Where does Ben live?", fields(name=text(12), address=_ADDRESS)),
    ("Extract the date: 'We meet on 3 May 2026.'", fields(date=text(10, pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$"))),
    ("What is 17 plus 25?", fields(expression=text(12), result={"type": "integer", "minimum": -99, "maximum": 99})),
    (
        "Call the weather service for Lisbon.",
        fields(name={"const": "get_weather"}, arguments=fields(city=text(16), unit={"enum": ["celsius", "kelvin"]})),
    ),
    ("Write an e-mail to Bob.", fields(to=listed(text(16), 2), subject=text(30), body=text(60))),
    ("Plan a trip to Rome.", fields(days=listed(fields(day=whole(1, 7), activity=text(30)), 2))),
    ("Score this essay.", fields(score={"type": "number", "minimum": 0, "maximum": 10}, reason=text(40))),
    ("Is it raining?", fields(answer={"anyOf": [{"type": "boolean"}, {"type": "null"}]})),
    (
        "Draw a circle or a square.",
        {
            "anyOf": [
                fields(kind={"const": "circle"}, radius=whole(1, 9)),
                fields(kind={"const": "square"}, side=whole(1, 9)),
            ]
        },
    ),
    (
        "Describe a small family.",
        {
            "$defs": {
                "person": fields(
                    name=text(10), children={"type": "array", "items": {"$ref": "#/$defs/child"}, "maxItems": 2}
                ),
                "child": fields(name=text(10)),
            },
            "$ref": "#/$defs/person",
        },
    ),
    (
        "Name a book, and its year if you know it.",
        {
            "type": "object",
            "properties": {"title": text(), "year": whole(1400, 2100)},
            "required": ["title"],
            "additionalProperties": False,
        },
    ),
    (
        "Tag this article about the sea.",
        fields(tags={"type": "array", "items": {"enum": ["sea", "travel", "food"]}, "minItems": 1, "maxItems": 3}),
    ),
    (
        "Which move do you play in chess?",
        fields(piece={"enum": ["pawn", "knight"]}, to=text(2, pattern="^[a-h][1-8]$")),
    ),
    (
        "Quel est ton nom ? Réponds en français.",
        fields(**{"prénom": text(12), "salut": {"enum": ["Bonjour", "Allô", "你好"]}}),
    ),
    (
        "Classify the ticket: 'My screen is broken.'",
        fields(category={"enum": ["hardware", "software"]}, urgent={"type": "boolean"}, summary=text(40)),
    ),
)
