"""Probes: what the event loop said last, and for how long it may say nothing."""

import json
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from proa.wsgi_server import serve_wsgi
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


def test_probes_are_answered_over_http(progress: Progress) -> None:
    port = free_port()
    stop = serve_wsgi(probe_app(progress), "127.0.0.1", port, name="proa-probes")
    try:
        progress.beat(accepts=False)
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            assert json.load(answer) == {"ok": True, "reason": ""}
        for path, status in (("/ready", 503), ("/other", 404)):
            with pytest.raises(HTTPError) as raised:
                urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)
            with raised.value as failed:
                assert failed.status == status
    finally:
        stop()
