"""The access log: one line of JSON for each HTTP request, written when its response has ended."""

import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proa_gateway.http import route_path

_log = logging.getLogger(__name__)
_PROBES = frozenset({"/health", "/ready", "/ping", "/metrics"})


def write_access_log() -> None:
    """Write the lines to standard output, and nothing else there: messages go to standard error."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False


class AccessLogMiddleware:
    """Logs requests, except those of probes and scrapers. Their state has `request_id`; `error_type` if they failed."""

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
                _log.info(_line(scope, status, complete, time.perf_counter() - started))


def _line(scope: Scope, status: int, complete: bool, seconds: float) -> str:
    headers = dict(scope["headers"])
    state = scope["state"]
    error_type = state.get("error_type")
    fields: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "client": scope["client"][0] if scope.get("client") else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "complete": complete and not (error_type and status == 200),  # False: the client left, or the stream failed
        "error_type": error_type,
        "duration_ms": round(seconds * 1000, 1),
        "model": state.get("model"),  # as the request names it
        "request_id": state.get("request_id"),
        "trace_id": state.get("trace_id"),
        "key": state["caller"].name or None if "caller" in state else None,
        "user_agent": headers.get(b"user-agent", b"").decode("latin-1")[:200] or None,
    }
    return orjson.dumps(fields).decode()
