"""A small HTTP server on threads of its own, for metrics and probes: few connections, each for a few seconds."""

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

MAX_CONNECTIONS = 16  # scrapers, probes and people
MAX_SECONDS = 10.0  # that a connection may take


def serve_wsgi(app: WSGIApplication, host: str, port: int, *, name: str) -> Callable[[], None]:
    """Serve `app` on a thread of this name and its threads; return a function that stops it. Raises OSError if the port
    cannot be bound."""
    server = _Server(host, port)
    server.set_app(_answers_head(app))
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def _answers_head(app: WSGIApplication) -> WSGIApplication:
    """Answer HEAD with the head of what `app` answers to GET."""

    def answer(environment: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environment["REQUEST_METHOD"] != "HEAD":
            return app(environment, start_response)
        starts: list[Any] = []
        parts: list[bytes] = []

        def start(*arguments: Any) -> Callable[[bytes], object]:
            starts.append(arguments)
            return parts.append

        parts += app({**environment, "REQUEST_METHOD": "GET"}, start)
        status, headers, *_ = starts[-1]
        start_response(status, [*headers, ("Content-Length", str(sum(map(len, parts))))])
        return []

    return answer


class _Handler(WSGIRequestHandler):
    """Answers one request of a connection, and logs none."""

    server: "_Server"

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        if is_valid:
            self.server.begin_response(self.request)
        return is_valid

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are at most `MAX_CONNECTIONS`. Beyond them the connection that has
    waited longest for its request is closed; if all have theirs, the new one is.

    `prometheus_client.start_http_server` limits neither their number nor their time.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[Any, float] = {}  # by connection, the oldest first
        self._idle: dict[Any, None] = {}  # those without a request, the oldest first
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._deadlines) < MAX_CONNECTIONS:
                return True
            idle = next(iter(self._idle), None)
            if idle is None:
                return False
            self._forget(idle)
            _end(idle)  # with the lock, so that its thread does not begin a response that would be cut
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._deadlines[request] = time.monotonic() + MAX_SECONDS
            self._idle[request] = None
        super().process_request(request, client_address)

    def begin_response(self, request: Any) -> None:
        """Called when a connection has its request, on its thread."""
        with self._lock:
            self._idle.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Called when a connection ends, on its thread, or is refused."""
        with self._lock:
            self._forget(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second."""
        now = time.monotonic()
        with self._lock:
            for request, deadline in self._deadlines.items():
                if now > deadline:
                    _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""

    def _forget(self, request: Any) -> None:
        self._deadlines.pop(request, None)
        self._idle.pop(request, None)


def _end(connection: socket.socket) -> None:
    """End what the connection's thread reads or writes."""
    with suppress(OSError):  # it has just ended
        connection.shutdown(socket.SHUT_RDWR)
