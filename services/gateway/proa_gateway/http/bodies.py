"""Request bodies: limits of their size, content and duration while they arrive, and of the time that parsing takes.

JSON parsers hold the interpreter lock until they are done, so another thread would not help: 16 MiB of `[],` take over
a second in any of them. `orjson` is the fastest, and long numbers and deep nesting do not slow it down.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.errors import (
    BodyTooLarge,
    GatewayError,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    UnsupportedMediaType,
)
from proa_gateway.http.errors import ErrorForms, route_path

MAX_COST: Final = 700_000  # in numbers of a list, which take 30 ms
LARGE_BODY: Final = 16 * 1024  # bytes, which take about 1 ms to parse and validate
# What else costs as much as so many numbers to read and to validate:
_TEXT: Final = 4
_KEY: Final = 12  # a field of an object, beside its name and its value
_LIST: Final = 12  # beside its elements
_OBJECT: Final = 30  # beside its fields
SILENCE: Final = 30.0  # seconds for which a client may send nothing of a body that has begun
LONGEST: Final = 600.0  # seconds for a body, the time of 16 MiB at 230 kbit/s
UNFINISHED_BODIES: Final = 16  # of the largest size, at one time: how many bytes bodies that still arrive may hold


class LargeBodies:
    """Passes large bodies to the application one at a time. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()  # first come, first served
        self._waiting: deque[float] = deque()  # when each arrived
        self._idle = asyncio.Event()  # set while `_waiting` is empty
        self._idle.set()

    async def turn(self) -> None:
        """Wait for the bodies that came earlier, and then for one turn of the event loop."""
        arrived = self._clock()
        self._waiting.append(arrived)
        self._idle.clear()
        try:
            async with self._lock:
                await asyncio.sleep(0)
        finally:
            self._waiting.remove(arrived)
            if not self._waiting:
                self._idle.set()

    async def none_waits(self) -> None:
        """Wait until all bodies are passed to the application."""
        await self._idle.wait()

    def delay(self) -> float:
        """Seconds for which the oldest body that is not passed on yet has waited; 0 if none waits."""
        return self._clock() - self._waiting[0] if self._waiting else 0.0


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def cost_bound(data: bytes) -> int:
    """Return an upper bound of the cost of parsing this part of a body. It also counts structure inside texts."""
    return _structure(data) + _TEXT * data.count(b'"')


def costs_too_much(body: bytes) -> bool:
    """Whether parsing the body costs more than `MAX_COST`. Takes up to a second if texts have many quotes."""
    cost = position = 0
    while (quote := body.find(b'"', position)) >= 0:
        cost += _structure(body[position:quote]) + _TEXT
        if cost > MAX_COST:
            return True
        position = _end_of_text(body, quote + 1)
    return cost + _structure(body[position:]) > MAX_COST


def _structure(data: bytes) -> int:
    """Return the cost of everything but texts."""
    containers = _LIST * data.count(b"[") + _OBJECT * data.count(b"{")
    return data.count(b",") + _KEY * data.count(b":") + containers


def _end_of_text(body: bytes, start: int) -> int:
    """Return the index behind the closing quote of the text that begins at `start`; the body's length if there is
    none."""
    position = start
    while (quote := body.find(b'"', position)) >= 0:
        part = body[position:quote]
        if (len(part) - len(part.rstrip(b"\\"))) % 2 == 0:
            return quote + 1
        position = quote + 1  # the quote is escaped
    return len(body)


class JsonRequest(Request):
    """A request whose JSON is parsed by `orjson` if it is large. Then texts with lone surrogates are an error that does
    not name the field, and integers over 64 bits become floats."""

    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LARGE_BODY:
            return await super().json()
        await asyncio.sleep(0)  # the body was copied in this turn of the event loop
        content = orjson.loads(body)
        await asyncio.sleep(0)  # others have a turn before it is validated
        return content


class JsonRoute(APIRoute):
    """A route that passes requests to its function as `JsonRequest`."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class BodyMemory(Protocol):
    """The bytes of bodies that are held."""

    def hold(self, num_bytes: int) -> None:
        """Raises `Overloaded` if there is no room."""

    def release(self, num_bytes: int) -> None: ...


class UnfinishedBodies:
    """The `BodyMemory` of bodies that are parsed as JSON as soon as they are complete."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def hold(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self._max_bytes:
            raise Overloaded("Too many large request bodies are arriving at the same time.")
        self._num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of the bodies of some paths. `is_json`: else the body is a form with files, which are held until the request has
    ended, and are not parsed at once."""

    max_bytes: int  # of one body
    memory: BodyMemory
    is_json: bool = True


class RequestBodies:
    """Middleware that rejects request bodies over the limit (by Content-Length or while reading), bodies that stop
    arriving, that contain too many JSON values, or that are compressed.

    Large bodies are passed on one at a time, with the event loop's other work between them: parsing one takes
    milliseconds, and a hundred that arrive at once would delay all streams by the sum.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        large_bodies: LargeBodies,
        error_forms: ErrorForms,
        *,
        forms: Mapping[str, BodyLimits] = MappingProxyType({}),
        silence: float = SILENCE,
        longest: float = LONGEST,
    ) -> None:
        """`max_bytes`: of a body that is no form. `forms`: the limits of those that are, by path. `silence`: seconds
        after which a body that stops arriving is rejected. `longest`: seconds for a whole body."""
        self._app = app
        self._json = BodyLimits(max_bytes, UnfinishedBodies(UNFINISHED_BODIES * max_bytes))
        self._forms = forms
        self._large_bodies = large_bodies
        self._error_forms = error_forms
        self._silence = silence
        self._longest = longest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits = self._forms.get(route_path(scope), self._json)
        try:
            _check_headers(dict(scope["headers"]), limits)
        except GatewayError as error:
            await self._error_forms.response(scope, error)(scope, receive, send)
            return
        body = _Body(limits, asyncio.get_running_loop().time() + self._longest)

        async def limited() -> Message:
            if body.is_complete:
                return await receive()
            message = await self._next_part(body, receive)
            if message["type"] == "http.request" and not message.get("more_body"):
                body.is_complete = True
                if limits.is_json:
                    limits.memory.release(body.num_held)
                    body.num_held = 0
                    await self._pass_on(body)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            limits.memory.release(body.num_held)

    async def _next_part(self, body: "_Body", receive: Receive) -> Message:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(loop.time() + self._silence, body.deadline)):
                message = await receive()
        except TimeoutError:
            raise RequestTimeout("The rest of the request body did not arrive in time.") from None
        body.add(message.get("body", b""))
        return message

    async def _pass_on(self, body: "_Body") -> None:
        parts, body.parts = body.parts, []
        if body.cost_bound > MAX_COST and await asyncio.to_thread(costs_too_much, b"".join(parts)):
            raise InvalidRequest(f"The body has too many values: it takes longer to read than {MAX_COST:,} numbers.")
        if body.num_bytes >= LARGE_BODY:
            await self._large_bodies.turn()


def _check_headers(headers: dict[bytes, bytes], limits: BodyLimits) -> None:
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limits.max_bytes:
        raise _too_large(limits)
    if (encoding := headers.get(b"content-encoding", b"identity").lower()) != b"identity":
        name = encoding[:80].decode("latin-1")
        raise UnsupportedMediaType(f"The body must not be compressed, it has the header Content-Encoding: {name}.")


def _too_large(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"The request body must not be larger than {limits.max_bytes} bytes.")


@dataclass(slots=True, eq=False)
class _Body:
    """The part of a body that has arrived."""

    limits: BodyLimits
    deadline: float  # event loop time
    parts: list[bytes] = field(default_factory=list)  # empty for a form
    num_bytes: int = 0
    num_held: int = 0  # of the memory's bytes
    cost_bound: int = 0  # of reading it as JSON
    is_complete: bool = False

    def add(self, part: bytes) -> None:
        """Raises `BodyTooLarge` and `Overloaded`."""
        self.num_bytes += len(part)
        if self.num_bytes > self.limits.max_bytes:
            raise _too_large(self.limits)
        self.limits.memory.hold(len(part))
        self.num_held += len(part)
        if self.limits.is_json:
            self.parts.append(part)
            self.cost_bound += cost_bound(part)
