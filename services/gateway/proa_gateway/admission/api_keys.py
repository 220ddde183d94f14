"""The middleware that asks for an API key, and tells its holder what is left of the limits.

Plain ASGI, before anything of a request's body is read. Knows neither where keys come from nor what they allow.
"""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.admission.auth import Caller
from proa_gateway.errors import InvalidApiKey
from proa_gateway.http import gateway_error_response

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"})
Authenticate = Callable[[Scope, str | None], Caller]
"""From a request's scope and `Authorization` header; raises `InvalidApiKey`."""


class AskForKey:
    """Leaves the caller in the request's state, under `caller`. Probes and scrapers are not asked."""

    def __init__(self, app: ASGIApp, authenticate: Authenticate) -> None:
        self._app = app
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        header = dict(scope["headers"]).get(b"authorization")
        try:
            caller = self._authenticate(scope, header.decode("latin-1") if header is not None else None)
        except InvalidApiKey as error:
            await gateway_error_response(error)(scope, receive, send)
            return
        scope["state"]["caller"] = caller

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = caller.usage.headers().items()
                message["headers"] = [*message["headers"], *((n.encode(), v.encode()) for n, v in limits)]
            await send(message)

        await self._app(scope, receive, send_with_limits if caller.name else send)
