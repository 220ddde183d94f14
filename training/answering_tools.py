"""Tools for weather, time and sums, and requests for them."""

import json
from random import Random

from training import sums
from training.tool_requests import Request, define, one_value, place, request
from training.tools import Tool

_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy", "dry", "warm", "cold", "wet")
_UNITS = ("celsius", "fahrenheit")


def weather(rng: Random) -> Tool:
    names = ("get_weather", "get_weather", "weather", "get_current_weather")
    descriptions = ("Get the weather", "Get the weather in a city", "Get the current weather in a given location")
    where = rng.choice(("city", "city", "location"))
    if rng.random() < 0.3:
        unit = {"type": "string", "enum": list(_UNITS)}
        return define(rng, names, descriptions, {where: "string", "unit": unit}, optional=("unit",))
    return define(rng, names, descriptions, {where: "string"})


def weather_result(rng: Random, city: str) -> tuple[str, str]:
    """A result and the answer from it."""
    degrees, sky = rng.randint(-15, 39), rng.choice(_SKIES)
    both = {"temperature": degrees, "condition": sky}
    swapped = {"condition": sky, "temperature": degrees}
    sentence = f"It is {sky} in {city}, with {degrees} degrees."
    return rng.choice((
        (json.dumps(both), sentence), (json.dumps(both), sentence), (json.dumps(swapped), sentence),
        (f"{sky}, {degrees} degrees", sentence),
        (json.dumps({"temperature": degrees}), f"It is {degrees} degrees in {city}."),
        (sky, f"It is {sky} in {city}."),
    ))  # fmt: skip


def ask_weather(rng: Random, tool: Tool) -> Request:
    city = place(rng)
    result, answer = weather_result(rng, city)
    question = rng.choice((
        f"What is the weather in {city}?", f"How is the weather in {city}?", f"What is the weather like in {city}?",
        f"Tell me the weather in {city}.", f"Is it cold in {city}?", f"How warm is it in {city}?",
        f"What's the weather in {city}?", f"What is the weather in {city} today?", f"Weather in {city}?",
    ))  # fmt: skip
    if "unit" in tool.parameters and rng.random() < 0.5:
        unit = rng.choice(_UNITS)
        asked = f"{question[:-1]} in {unit}{question[-1]}"
        return request(asked, tool, (city, unit), result, answer, city)
    return request(question, tool, (city,), result, answer, city)


def clock(rng: Random) -> Tool:
    names, descriptions = ("get_time", "get_time", "current_time"), ("Get the time in a city", "Get the current time")
    return define(rng, names, descriptions, {rng.choice(("city", "city", "location")): "string"})


def ask_clock(rng: Random, tool: Tool) -> Request:
    city, now = place(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    question = rng.choice((
        f"What time is it in {city}?", f"What is the time in {city}?", f"Tell me the time in {city}.",
        f"What time is it in {city} now?", f"How late is it in {city}?",
    ))  # fmt: skip
    result = one_value(rng, ("time", "time", "now"), now)
    return request(question, tool, (city,), result, f"It is {now} in {city}.", city)


def calculator(rng: Random) -> Tool:
    left, right = rng.choice((("a", "b"), ("a", "b"), ("x", "y")))
    kind = rng.choice(("integer", "integer", "number"))
    return define(rng, ("add", "add", "sum"), ("Add two numbers", "The sum of two numbers"), {left: kind, right: kind})


def ask_calculator(rng: Random, tool: Tool) -> Request:
    top = rng.choice((99, 999, 9999))
    left, right = rng.randint(0, top), rng.randint(0, top)
    question = rng.choice((
        f"What is {left} plus {right}?", f"What is {left} + {right}?", f"Add {left} and {right}.",
        f"What is the sum of {left} and {right}?", f"Calculate {left} + {right}.", f"How much is {left} plus {right}?",
    ))  # fmt: skip
    result = one_value(rng, ("result", "result", "sum"), left + right)
    asked = request(question, tool, (left, right), result, f"{left} + {right} = {left + right}.", f"{left}:{right}")
    # The same key as without a tool, so that no held-out sum is trained on.
    return Request(asked.exchange, sums.sum_key(left, right) or asked.combination)
