"""Probes: what the event loop said last, and for how long it may say nothing."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from proa.wsgi_server import MAX_CONNECTIONS, serve_wsgi
from proa_gateway.http.probes import ALIVE_SECONDS, READY_SECONDS, Progress, probe_app
from support.processes import free_port


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)


def test_a_gateway_that_starts_is_neither(progress: Progress) -> None:
    assert progress.not_alive() == progress.not_ready() == "the gateway is starting"


def test_without_engines_it_is_alive_and_not_ready(progress: Progress) -> None:
    progress.beat(accepts=False)
    assert not progress.not_alive()
    assert progress.not_ready() == "no engine is usable"


@pytest.mark.parametrize(
    ("silence", "alive", "ready"),
    [(20.0, True, True), (READY_SECONDS + 1, True, False), (ALIVE_SECONDS + 1, False, False)],
)
def test_a_busy_event_loop_is_given_time(
    progress: Progress, clock: Clock, silence: float, alive: bool, ready: bool
) -> None:
    progress.beat(accepts=True)
    clock.now += silence
    assert (not progress.not_alive(), not progress.not_ready()) == (alive, ready)
    progress.beat(accepts=True)
    assert progress.not_alive() == progress.not_ready() == ""


def test_a_gateway_that_drains_is_not_ready_at_once_and_stays_alive(progress: Progress, clock: Clock) -> None:
    progress.beat(accepts=True)
    progress.drain()
    clock.now += 2 * ALIVE_SECONDS
    assert progress.not_ready() == "the gateway is shutting down"
    assert not progress.not_alive()


@pytest.fixture
def port(progress: Progress) -> Iterator[int]:
    progress.beat(accepts=False)
    port = free_port()
    stop = serve_wsgi(probe_app(progress), "127.0.0.1", port, name="proa-probes")
    yield port
    stop()


def status_of(port: int, path: str) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            status: int = answer.status
            return status
    except HTTPError as error:
        with error:
            return error.code


def test_probes_are_answered_over_http(port: int) -> None:
    with urlopen(f"http://127.0.0.1:{port}/health", timeout=30) as answer:
        assert json.load(answer) == {"ok": True, "reason": ""}
    assert [status_of(port, path) for path in ("/health", "/health/", "/ready", "/other")] == [200, 200, 503, 404]


def test_idle_connections_do_not_take_the_probes_away(port: int) -> None:
    with ExitStack() as stack:
        for begun in (b"", b"GET /health HTTP/1.1\r\nX: ") * MAX_CONNECTIONS:
            idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            idle.sendall(begun)
        assert [status_of(port, "/health") for _ in range(25)] == [200] * 25
