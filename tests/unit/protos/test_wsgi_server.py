"""The HTTP server of metrics and probes: clients that say nothing take few threads, and only for a while."""

import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.request import urlopen
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import pytest
from prometheus_client import CollectorRegistry, Counter, make_wsgi_app

from proa import wsgi_server
from proa.wsgi_server import MAX_CONNECTIONS, serve_wsgi
from support.processes import free_port


@contextmanager
def served(app: WSGIApplication) -> Iterator[int]:
    port = free_port()
    stop = serve_wsgi(app, "127.0.0.1", port, name="proa-metrics")
    yield port
    stop()


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    Counter("steps", "Steps.", registry=registry).inc(3)
    with served(make_wsgi_app(registry)) as port:
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def scrape(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def ended(connection: socket.socket) -> bool:
    """Wait for the end of a connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_metrics_are_served(port: int) -> None:
    assert "steps_total 3.0" in scrape(port)


def test_head_is_answered_as_get_without_the_body(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"HEAD /metrics HTTP/1.0\r\n\r\n")
        head, body = connection.makefile("rb").read().split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 ")
    length = int(dict(line.split(b": ", 1) for line in head.lower().splitlines()[1:])[b"content-length"])
    assert (length, body) == (len(scrape(port)), b"")


def test_idle_connections_neither_take_the_port_away_nor_many_threads(port: int) -> None:
    num_threads = threading.active_count()
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(port)) for _ in range(2 * MAX_CONNECTIONS)]
        for connection in connections[::2]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        for _ in range(25):
            assert "steps_total 3.0" in scrape(port)
        assert all(ended(connection) for connection in connections[:MAX_CONNECTIONS])
        deadline = time.monotonic() + 30
        while threading.active_count() > num_threads + MAX_CONNECTIONS:  # some are about to end
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_the_connection_that_has_been_idle_longest_makes_room() -> None:
    with served(lambda environment, start: []) as port, ExitStack() as stack:
        connections = [stack.enter_context(connect(port)) for _ in range(MAX_CONNECTIONS + 3)]
        assert all(ended(connection) for connection in connections[:3])
        for connection in connections[3:]:
            connection.settimeout(0)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def test_a_response_is_not_cut_for_new_connections() -> None:
    answering, answer = threading.Semaphore(0), threading.Event()

    def app(environment: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answering.release()
        assert answer.wait(30)
        start_response("200 OK", [])
        return [b"whole"]

    with served(app) as port, ExitStack() as stack:
        connections = [stack.enter_context(connect(port)) for _ in range(MAX_CONNECTIONS)]
        for connection in connections:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        for _ in connections:
            assert answering.acquire(timeout=30)
        late = [stack.enter_context(connect(port)) for _ in range(3)]
        assert all(ended(connection) for connection in late)
        answer.set()
        for connection in connections:
            assert connection.makefile("rb").read().endswith(b"whole")


def test_connections_that_take_too_long_make_room(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsgi_server, "MAX_SECONDS", 0.0)
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(port)) for _ in range(MAX_CONNECTIONS)]
        for connection in connections:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert all(ended(connection) for connection in connections)
        monkeypatch.undo()
        assert "steps_total 3.0" in scrape(port)
