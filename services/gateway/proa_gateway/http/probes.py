"""Probes answered on a thread beside the event loop, so that Kubernetes neither restarts a gateway that is only busy,
nor removes it from its Service.

Several times a second the loop records that it runs, and in which state. A thread answers from the last record.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import orjson

READY_SECONDS: Final = 30.0  # without a sign of the loop, after which no new requests should come
ALIVE_SECONDS: Final = 60.0  # after which a restart is better, though it ends all streams


class Progress:
    """The last state that the event loop recorded. Written by the loop, read by any thread. `clock`: monotonic
    seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None  # when the loop ran; None: it has not started
        self._accepts = False  # as of the last beat
        self._is_draining = False

    def beat(self, *, accepts: bool) -> None:
        """Record that the loop runs. `accepts`: whether it can serve requests: engines are known, or requests may wait
        for one."""
        self._accepts = accepts
        self._last = self._clock()

    def drain(self) -> None:
        """Record that the gateway finishes its requests and takes no new ones. From now on a loop that stands still
        counts as alive: other limits end a shutdown that takes too long."""
        self._is_draining = True

    def not_alive(self) -> str:
        """Return why the process should be restarted; empty if it should not."""
        if self._last is None:
            return "the gateway is starting"
        silence = self._clock() - self._last
        if silence > ALIVE_SECONDS and not self._is_draining:
            return f"the event loop has not run for {silence:.0f} s"
        return ""

    def not_ready(self) -> str:
        """Return why the process should get no new requests; empty if it should."""
        if self._last is None:
            return "the gateway is starting"
        if self._is_draining:
            return "the gateway is shutting down"
        silence = self._clock() - self._last
        if silence > READY_SECONDS:
            return f"the event loop has not run for {silence:.0f} s"
        return "" if self._accepts else "no engine is usable"


def probe_app(progress: Progress) -> WSGIApplication:
    """Answers GET /health and GET /ready: 200, or 503 with the reason."""
    answers = {"/health": progress.not_alive, "/ready": progress.not_ready}

    def app(environment: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer = answers.get(environment["PATH_INFO"].rstrip("/"))
        if answer is None:
            start_response("404 Not Found", [])
            return []
        reason = answer()
        status = "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "application/json")])
        return [orjson.dumps({"ok": not reason, "reason": reason})]

    return app
