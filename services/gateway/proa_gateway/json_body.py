"""JSON bodies: how long one takes to read is known, and bounded, before it is read.

Parsers hold the interpreter lock until they are done, so another thread would not help: 16 MiB of `[],` take over a
second in any of them. `orjson` needs the least, and takes no longer for long numbers and deep nesting than for others.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

MAX_COST: Final = 700_000  # in numbers of a list, which take 30 ms
LARGE_BODY: Final = 16 * 1024  # bytes, which take about 1 ms to parse and validate
# What else costs as much as so many numbers to read and to validate:
_TEXT: Final = 4
_KEY: Final = 12  # a field of an object, beside its name and its value
_LIST: Final = 12  # beside its elements
_OBJECT: Final = 30  # beside its fields
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def cost_bound(data: bytes) -> int:
    """Not less than the cost of reading this part of a body. It counts what stands in texts too."""
    return _structure(data) + _TEXT * data.count(b'"')


def costs_too_much(body: bytes) -> bool:
    """Whether reading the body costs more than `MAX_COST`. Takes up to a second where texts have many quotes."""
    cost = position = 0
    while (quote := body.find(b'"', position)) >= 0:
        cost += _structure(body[position:quote]) + _TEXT
        if cost > MAX_COST:
            return True
        position = _end_of_text(body, quote + 1)
    return cost + _structure(body[position:]) > MAX_COST


def _structure(data: bytes) -> int:
    """The cost of all but texts."""
    containers = _LIST * data.count(b"[") + _OBJECT * data.count(b"{")
    return data.count(b",") + _KEY * data.count(b":") + containers


def _end_of_text(body: bytes, start: int) -> int:
    """Where the text that begins at `start` has ended, with its quote; the end of the body if it does not end."""
    position = start
    while (quote := body.find(b'"', position)) >= 0:
        part = body[position:quote]
        if (len(part) - len(part.rstrip(b"\\"))) % 2 == 0:
            return quote + 1
        position = quote + 1  # the quote is escaped
    return len(body)


class JsonRequest(Request):
    """Its JSON is read by `orjson` if it is large. Then no text may have lone surrogates, of which the error of a small
    body names the field, and integers over 64 bits are floats."""

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LARGE_BODY:
            return await super().json()
        await asyncio.sleep(0)  # the body was copied in this turn of the event loop
        content = orjson.loads(body)
        await asyncio.sleep(0)  # others have a turn before it is validated
        return content


class JsonRoute(APIRoute):
    """Gives the requests of a route to it as `JsonRequest`."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
