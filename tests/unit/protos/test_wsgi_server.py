"""The HTTP server of metrics and probes: clients that say nothing take few threads, and only for a while."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Counter, make_wsgi_app

from proa import wsgi_server
from proa.wsgi_server import MAX_CONNECTIONS, serve_wsgi
from support.processes import free_port


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry).inc(3)
    port = free_port()
    stop = serve_wsgi(make_wsgi_app(registry), "127.0.0.1", port, name="proa-metrics")
    yield port
    stop()


def scrape(port: int) -> str:
    """Try again while the server has no room."""
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text: str = answer.read().decode()
            return text
        except ConnectionError:
            continue
        except URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise


def ended(connection: socket.socket) -> bool:
    """Wait for the end of a connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_metrics_are_served(port: int) -> None:
    assert "steps_total 3.0" in scrape(port)


def test_connections_beyond_the_limit_are_closed_at_once(port: int) -> None:
    num_threads = threading.active_count()
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(3 * MAX_CONNECTIONS)
        ]
        assert all(ended(connection) for connection in connections[MAX_CONNECTIONS:])
        assert threading.active_count() <= num_threads + MAX_CONNECTIONS


def test_connections_that_take_too_long_make_room(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_server, "MAX_SECONDS", 0.0)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(MAX_CONNECTIONS)
        ]
        for connection in connections:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert all(ended(connection) for connection in connections)
        monkeypatch.undo()
        assert "steps_total 3.0" in scrape(port)
