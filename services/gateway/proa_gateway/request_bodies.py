"""RequestBodies: bounds what request bodies may hold and for how long, while they arrive."""

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.errors import (
    BodyTooLarge,
    GatewayError,
    InvalidRequest,
    Overloaded,
    RequestTimeout,
    UnsupportedMediaType,
)
from proa_gateway.http import gateway_error_response
from proa_gateway.json_body import LARGE_BODY, MAX_COST, cost_bound, costs_too_much
from proa_gateway.large_bodies import LargeBodies

SILENCE: Final = 30.0  # seconds for which a client may send nothing of a body that has begun
LONGEST: Final = 600.0  # seconds for a body, the time of 16 MiB at 230 kbit/s
UNFINISHED_BODIES: Final = 16  # of the largest size, at one time: how many bytes bodies that still arrive may hold


class RequestBodies:
    """Middleware that rejects request bodies over `max_bytes`, by their Content-Length or while reading them, those
    that do not go on, that hold too many JSON values, and compressed ones.

    Large bodies are passed on one at a time, with the event loop's other work between them: parsing one takes
    milliseconds, and a hundred that come at once would hold up all streams for as long as they take together.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        large_bodies: LargeBodies,
        *,
        silence: float = SILENCE,
        longest: float = LONGEST,
    ) -> None:
        """`silence`, `longest`: seconds for which nothing may arrive of a body, and for a whole one."""
        self._app = app
        self._max_bytes = max_bytes
        self._large_bodies = large_bodies
        self._silence = silence
        self._longest = longest
        self._unfinished_bytes = 0  # of all bodies that still arrive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(dict(scope["headers"]))
        except GatewayError as error:
            await gateway_error_response(error)(scope, receive, send)
            return
        body = _Body(asyncio.get_running_loop().time() + self._longest)

        async def limited() -> Message:
            if body.is_complete:
                return await receive()
            message = await self._next_part(body, receive)
            if message["type"] == "http.request" and not message.get("more_body"):
                self._finish(body)
                await self._pass_on(body)
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._finish(body)

    def _check_headers(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()
        if (encoding := headers.get(b"content-encoding", b"identity").lower()) != b"identity":
            name = encoding[:80].decode("latin-1")
            raise UnsupportedMediaType(f"The body must not be compressed, it has the header Content-Encoding: {name}.")

    async def _next_part(self, body: "_Body", receive: Receive) -> Message:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(loop.time() + self._silence, body.deadline)):
                message = await receive()
        except TimeoutError:
            raise RequestTimeout("The rest of the request body did not arrive in time.") from None
        part = message.get("body", b"")
        body.add(part)
        self._unfinished_bytes += len(part)
        if body.num_bytes > self._max_bytes:
            raise self._too_large()
        if self._unfinished_bytes > UNFINISHED_BODIES * self._max_bytes:
            raise Overloaded("Too many large request bodies are arriving at the same time.")
        return message

    async def _pass_on(self, body: "_Body") -> None:
        parts, body.parts = body.parts, []
        if body.cost_bound > MAX_COST and await asyncio.to_thread(costs_too_much, b"".join(parts)):
            raise InvalidRequest(f"The body has too many values: it takes longer to read than {MAX_COST:,} numbers.")
        if body.num_bytes >= LARGE_BODY:
            await self._large_bodies.turn()

    def _finish(self, body: "_Body") -> None:
        if not body.is_complete:
            body.is_complete = True
            self._unfinished_bytes -= body.num_bytes

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body must not be larger than {self._max_bytes} bytes.")


class _Body:
    """What has arrived of one. `deadline`: event loop time."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.parts: list[bytes] = []
        self.num_bytes = 0
        self.cost_bound = 0  # of reading it as JSON
        self.is_complete = False

    def add(self, part: bytes) -> None:
        self.parts.append(part)
        self.num_bytes += len(part)
        self.cost_bound += cost_bound(part)
