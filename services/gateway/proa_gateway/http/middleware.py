"""Middleware: paths, the method HEAD, request ids and the access log; names under which the gateway answers."""

import ipaddress
import logging
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa.logs import Format, make_handler, request_state, with_fields
from proa_gateway.errors import HostNotAllowed
from proa_gateway.http.errors import ErrorForms, route_path
from proa_gateway.observability.outcome import Outcome

REQUEST_ID: Final = r"[\x21-\x7e]{1,128}"
"""Pattern of the ids that clients may choose: what fits into headers, logs and engines' request ids."""
_PROBES = frozenset({"/health", "/ready", "/ping", "/metrics"})
_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


class Paths:
    """Middleware that serves the routes under `root_path` too, and with a slash at their end.

    A redirect would name `http://` behind a proxy that ends TLS, so Starlette's for slashes are off. The only one left,
    to the page at the root path, whose links are relative, names the path alone.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._root_path:
                scope["root_path"] = self._root_path  # Starlette ignores it for other paths
            path = route_path(scope)
            if not path:
                await RedirectResponse(f"{self._root_path}/")(scope, receive, send)
                return
            if path.endswith("/") and path.strip("/"):
                scope["path"] = scope["path"].rstrip("/")
        await self._app(scope, receive, send)


class HeadAsGet:
    """Middleware that answers HEAD as GET. The server, whose scope still says HEAD, leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


_valid = re.compile(REQUEST_ID.encode()).fullmatch


class RequestIdMiddleware:
    """Sets `request_id` in a request's state: its `X-Request-Id` header if that is valid, otherwise a new id.

    The response gets the id that the state has when it starts, and the headers that the route adds to
    `response_headers` in the state. Events of a stream do not pass through here.
    """

    def __init__(self, app: ASGIApp, error_forms: ErrorForms) -> None:
        self._app = app
        self._error_forms = error_forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"x-request-id", b"")
        state = scope["state"]
        state["request_id"] = sent.decode() if _valid(sent) else secrets.token_hex(16)
        headers: list[tuple[bytes, bytes]] = []
        state["response_headers"] = headers
        request_state.set(state)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._error_forms.id_headers(scope), *headers]
            await send(message)

        await self._app(scope, receive, send_with_id)


_log = logging.getLogger("proa_gateway.access_log")


def write_access_log(format: Format) -> None:
    """Send the access log's lines to standard output. Other messages go to standard error."""
    _log.addHandler(make_handler(format, sys.stdout, "gateway", with_fields=True))
    _log.setLevel(logging.INFO)
    _log.propagate = False


class AccessLogMiddleware:
    """Logs requests, except those of probes and scrapers. Their state has `request_id`; `error_type` if they failed;
    `outcome` if engines work for them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status, complete = 499, False  # of a client that left before the response began

        async def observe(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, observe)
        except Exception:
            status = 500  # the response is made further out
            raise
        finally:
            if route_path(scope) not in _PROBES:
                fields = _fields(scope, status, complete, time.perf_counter() - started)
                _log.info("request", extra=with_fields(**fields))


def _fields(scope: Scope, status: int, complete: bool, seconds: float) -> dict[str, Any]:
    state, error_type = scope["state"], scope["state"].get("error_type")
    outcome: Outcome | None = state.get("outcome")
    return {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "complete": complete and not (error_type and status == 200),  # False: the client left, or the stream failed
        "error_type": error_type,
        "duration_ms": round(seconds * 1000, 1),
        "model": state.get("model"),  # as the request names it
        **(outcome.log_fields if outcome is not None else {}),
        "request_id": state.get("request_id"),
        "trace_id": state.get("trace_id"),
        "key": state["caller"].name or None if "caller" in state else None,
        "client": scope["client"][0] if scope.get("client") else None,
        "user_agent": dict(scope["headers"]).get(b"user-agent", b"").decode("latin-1")[:200] or None,
    }


def parse_host_pattern(text: str) -> str:
    """Raises `ValueError` for what is not a name, `*.` and a name, or `*`."""
    if not _HOST_PATTERN.fullmatch(text.lower()):
        raise ValueError(f"{text!r} is not a host name such as llm.example.com, *.example.com or *, without a port")
    return text.lower()


class AllowedHosts:
    """The names under which a gateway without API keys answers: those of the header `Host`. IP addresses, `localhost`
    and names without a dot, which the public DNS does not have, are always allowed.

    Without keys a gateway trusts whoever reaches its address, and the browser of a person in its network does. A web
    page whose own name resolves to that address (DNS rebinding) is of the same origin for the browser, so that CORS
    does not keep it from sending requests and reading the answers. But the header names the page's host, which no page
    can change.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        """`patterns`: names, `*.` and a name for all names below it, or `*` for any."""
        self._names = {"localhost"}
        self._suffixes = [".localhost"]  # of names below the patterns with `*`
        for pattern in patterns:
            if pattern.startswith("*"):
                self._suffixes.append(pattern[1:])  # of "*" the empty one
            else:
                self._names.add(pattern.lower())

    @classmethod
    def of_machine(cls, host: str, patterns: Iterable[str]) -> "AllowedHosts":
        """Also allows the name `host` on which the gateway listens, and this machine's own name."""
        own = socket.gethostname()
        return cls([host, own, f"{own}.local", *patterns])

    def check(self, header: str) -> None:
        """`header`: the header `Host`, empty if there is none: browsers always send it. Raises `HostNotAllowed`."""
        name = re.sub(r":[0-9]*$", "", header.strip()).rstrip(".").lower()
        with suppress(ValueError):
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
            return
        if "." not in name or name in self._names or name.endswith(tuple(self._suffixes)):
            return
        shown = name[:80]
        raise HostNotAllowed(
            f"The gateway does not answer under the name {shown!r}, which the request's header Host has. Start it with "
            f"--allowed-hosts {shown} (chart: gateway.allowedHosts), or with API keys, which make names irrelevant."
        )
