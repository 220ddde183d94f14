"""Tools that search and set a timer, and requests for them."""

from random import Random

from training.tool_requests import Request, define, done, one_value, place, request, thing
from training.tools import Tool


def search(rng: Random) -> Tool:
    names, parameter = ("search", "web_search"), rng.choice(("query", "query", "q"))
    return define(rng, names, ("Search the web", "Search for something"), {parameter: "string"})


def ask_search(rng: Random, tool: Tool) -> Request:
    query, count = thing(rng), rng.randint(0, 99)
    question = rng.choice(
        (f"Search for {query}.", f"Search the web for {query}.", f"Find {query}.", f"Look up {query}.")
    )
    result, answer = rng.choice((
        (one_value(rng, ("count", "results", "found"), count), f"I found {count} results for {query}."),
        (text := f"There are many {query} in {place(rng)}.", text),
    ))  # fmt: skip
    return request(question, tool, (query,), result, answer, query)


def timer(rng: Random) -> Tool:
    return define(rng, ("set_timer", "timer"), ("Set a timer", "Start a timer"), {"minutes": "integer"})


def ask_timer(rng: Random, tool: Tool) -> Request:
    minutes = rng.randint(2, 120)
    question = rng.choice((f"Set a timer for {minutes} minutes.", f"Start a timer of {minutes} minutes.",
                           f"Wake me in {minutes} minutes."))  # fmt: skip
    return request(
        question, tool, (minutes,), done(rng), f"The timer is set for {minutes} minutes.", f"timer:{minutes}"
    )
