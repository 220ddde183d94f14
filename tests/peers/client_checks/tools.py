"""Tools and schemas that several checks use. The built-in model has learned to call tools like these."""

from collections.abc import Callable
from typing import Any

QUESTION = "What is the weather in Rome?"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": PARAMETERS,
}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CAPITAL = "What is the capital of France?"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error that the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
