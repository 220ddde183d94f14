"""Request ids: the `X-Request-Id` header of requests and responses."""

import re
import secrets
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID: Final = r"[\x21-\x7e]{1,128}"
"""Pattern of the ids that clients may choose: what fits into headers, logs and engines' request ids."""
_valid = re.compile(REQUEST_ID.encode()).fullmatch


class RequestIdMiddleware:
    """Sets `request_id` in a request's state: its `X-Request-Id` header if that is valid, else a new id.

    The response has the id too, as the route leaves it in the state, and the headers that the route adds to
    `response_headers` there. Events of a stream do not pass through here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"")
        state = scope["state"]
        state["request_id"] = sent.decode() if _valid(sent) else secrets.token_hex(16)
        headers: list[tuple[bytes, bytes]] = []
        state["response_headers"] = headers

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", state["request_id"].encode()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_id)
