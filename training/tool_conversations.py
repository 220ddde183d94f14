"""Conversations in which tools are offered: fitting ones are called, others are not."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from training import acting_tools, answering_tools
from training.talk import REFUSAL, with_opener
from training.tool_requests import Kind, Request
from training.tools import Tool
from training.turns import Conversation, Exchange, Turn, draw

KINDS: dict[str, Kind] = {
    "weather": Kind(answering_tools.weather, answering_tools.ask_weather),
    "clock": Kind(answering_tools.clock, answering_tools.ask_clock),
    "calculator": Kind(answering_tools.calculator, answering_tools.ask_calculator),
    "search": Kind(acting_tools.search, acting_tools.ask_search),
    "timer": Kind(acting_tools.timer, acting_tools.ask_timer),
}
_WEIGHTS = (3, 2, 2, 1.5, 1)
_ERRORS = ("unknown city", "not found", "no connection", "timeout", "invalid argument", "not allowed", "try later")
_PLACES = ("weather", "clock")
Toolbox = dict[str, Tool]


def tool_conversation(rng: Random, plain_turn: Callable[[Random], Turn], system: str | None) -> Conversation:
    """A conversation with one to three tools. `plain_turn` draws a question that needs none of them."""
    toolbox = draw_toolbox(rng)
    exchanges: list[Exchange] = []
    combinations: list[str | None] = []
    for _ in range(rng.choice((1, 2, 3, 4))):
        chance = rng.random()
        if chance < 0.65:
            request = draw(partial(fitting_request, toolbox=toolbox, before=exchanges[-1:]), rng)
            exchanges.append(with_errors(rng, request.exchange) if rng.random() < 0.05 else request.exchange)
            combinations.append(request.combination)
        else:
            topic = unfit_turn if chance < 0.82 else partial(needless_turn, plain_turn=plain_turn)
            turn = draw(partial(topic, toolbox=toolbox), rng)
            exchanges.append(Exchange(turn.question, turn.answer))
            combinations.append(turn.combination)
    opened = (replace(exchange, question=with_opener(rng, exchange.question)) for exchange in exchanges)
    return Conversation(system, tuple(opened), tuple(key for key in combinations if key), tuple(toolbox.values()))


def draw_toolbox(rng: Random) -> Toolbox:
    """One to three tools of different kinds in random order."""
    count = rng.choice((1, 1, 2, 2, 3))
    chosen: Toolbox = {}
    while len(chosen) < count:
        kind = rng.choices(tuple(KINDS), _WEIGHTS)[0]
        chosen.setdefault(kind, KINDS[kind].tool(rng))
    return chosen


def fitting_request(rng: Random, toolbox: Toolbox, before: Sequence[Exchange] = ()) -> Request:
    """A request for one of the tools. After one for a place, often short: "And in Rome?"."""
    kind = rng.choice(tuple(toolbox))
    request = KINDS[kind].ask(rng, toolbox[kind])
    calls = request.exchange.calls
    is_repeated = any(call.name == calls[0].name for exchange in before for call in exchange.calls)
    if kind in _PLACES and is_repeated and len(calls) == len(calls[0].arguments) == 1 and rng.random() < 0.6:
        question = rng.choice(("And in {}?", "What about {}?", "And {}?")).format(*calls[0].arguments.values())
        return replace(request, exchange=replace(request.exchange, question=question))
    return request


def unfit_turn(rng: Random, toolbox: Collection[str] = ()) -> Turn:
    """A request that none of the offered tools can serve. Sums are answered without a tool, so they are left out."""
    kind = rng.choice([kind for kind in KINDS if kind not in (*toolbox, "calculator")])
    request = KINDS[kind].ask(rng, KINDS[kind].tool(rng))
    return Turn(request.exchange.question, REFUSAL, {"answer": "unknown"}, request.combination)


def needless_turn(rng: Random, plain_turn: Callable[[Random], Turn], toolbox: Collection[str]) -> Turn:
    """A question that the model answers itself. With a calculator offered, one without numbers."""
    while True:
        turn = plain_turn(rng)
        if "calculator" not in toolbox or not any(character.isdigit() for character in turn.question):
            return turn


def with_errors(rng: Random, exchange: Exchange) -> Exchange:
    """The exchange with tools that fail."""
    error = rng.choice(_ERRORS)
    result = rng.choice((json.dumps({"error": error}), f"error: {error}", f"Error: {error}"))
    answer = f"I am sorry, the tool failed: {error}."
    return replace(exchange, answer=answer, results=(result,) * len(exchange.calls))
