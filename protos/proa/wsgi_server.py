"""A small HTTP server on threads of its own, for metrics and probes: few connections, each for a few seconds."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

MAX_CONNECTIONS = 16  # scrapers, probes and people; more are closed at once
MAX_SECONDS = 10.0  # that a connection may take


def serve_wsgi(app: WSGIApplication, host: str, port: int, *, name: str) -> Callable[[], None]:
    """Serve `app` on a thread of this name and its threads; return a function that stops it. Raises OSError if the port
    cannot be bound."""
    server = _Server(host, port)
    server.set_app(app)
    thread = threading.Thread(target=server.serve_forever, name=name, daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class _SilentHandler(WSGIRequestHandler):
    """Answers one request of a connection, and logs none."""

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, of which there are at most `MAX_CONNECTIONS`.

    `prometheus_client.start_http_server` limits neither their number nor their time.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self._deadlines: dict[Any, float] = {}  # by connection
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _SilentHandler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._deadlines) < MAX_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        self._deadlines[request] = time.monotonic() + MAX_SECONDS
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Called when a connection ends, on its thread, or is refused."""
        self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second."""
        now = time.monotonic()
        for request, deadline in list(self._deadlines.items()):
            if now > deadline:
                with suppress(OSError):  # it has just ended
                    request.shutdown(socket.SHUT_RDWR)  # ends what its thread reads or writes

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""
