"""An engine process dies or hangs in mid-stream: the client gets an error at once, and the gateway keeps running."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from proa_gateway.config import Deadlines
from support.processes import engine_process, fake_engine_process, free_port, gateway_process, wait_for_engines

LIMIT = 2.0  # seconds from the end of the engine to the end of the stream
ROUTE = "/v1/chat/completions"
SLOWLY = ("--repeat", "--step-delay", "0.01")


def body(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Go on."}]
    return {"messages": messages, "stream": True, "max_tokens": 100_000, "ignore_eos": True, **changes}


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The stream's JSON events; `[DONE]` must be the last line if it comes."""
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def kill_in_mid_stream(client: httpx.Client, pid: int, number: signal.Signals, **changes: Any) -> tuple[Any, float]:
    """Signal the engine after some tokens; returns the stream's last event and the seconds until it arrived."""
    with client.stream("POST", ROUTE, json=body(**changes)) as answer:
        assert answer.status_code == 200
        stream = events(answer)
        for _ in range(5):
            next(stream)
        os.kill(pid, number)
        killed = time.monotonic()
        last = list(stream)[-1]
    return last, time.monotonic() - killed


@pytest.mark.parametrize("kind", ["fake", "real"])
def test_a_killed_engine_ends_the_stream_with_a_typed_error_within_two_seconds(
    kind: str,
) -> None:
    engine: AbstractContextManager[tuple[subprocess.Popen[bytes], str]]
    if kind == "fake":
        engine = fake_engine_process(*SLOWLY)
    else:
        engine = engine_process("--model=builtin", "--max-num-batched-tokens=256", env={"OMP_NUM_THREADS": "1"})
    with (
        engine as (process, address),
        gateway_process(address) as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        last, seconds = kill_in_mid_stream(client, process.pid, signal.SIGKILL, max_tokens=1_900)
        assert last["error"]["code"] == "engine_lost"
        assert last["error"]["type"] == "server_error"
        assert seconds < LIMIT
        refused = client.post(ROUTE, json=body())
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


def test_an_unreachable_second_engine_does_not_delay_the_error() -> None:
    with (
        fake_engine_process(*SLOWLY) as (process, address),
        gateway_process(address, "--engine", f"127.0.0.1:{free_port()}") as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        last, seconds = kill_in_mid_stream(client, process.pid, signal.SIGKILL)
        assert last["error"]["code"] == "engine_lost"
        assert seconds < LIMIT


def test_a_hung_engine_ends_the_stream_and_a_new_one_at_its_address_is_used() -> None:
    with fake_engine_process(*SLOWLY) as (hung, address):
        port = int(address.rpartition(":")[2])
        with (
            gateway_process(address) as (_, gateway_port),
            httpx.Client(base_url=f"http://127.0.0.1:{gateway_port}", timeout=30) as client,
        ):
            last, seconds = kill_in_mid_stream(client, hung.pid, signal.SIGSTOP)
            assert last["error"]["code"] == "engine_lost"
            assert seconds < Deadlines().heartbeat + 2 * LIMIT  # silence is noticed later than a broken connection
            hung.kill()
            hung.wait()
            with fake_engine_process("--text", "Here again.", port=port):
                deadline = time.monotonic() + 20
                while client.get("/ready").status_code != 200:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                answer = client.post(ROUTE, json=body(stream=False))
                assert answer.json()["choices"][0]["message"]["content"] == "Here again."


def test_the_other_engine_takes_over_the_streams_and_the_next_requests() -> None:
    with (
        fake_engine_process(*SLOWLY) as (first, first_address),
        fake_engine_process(*SLOWLY) as (second, second_address),
        gateway_process(first_address, "--engine", second_address) as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        wait_for_engines(port, 2)
        with client.stream("POST", ROUTE, json=body()) as one, client.stream("POST", ROUTE, json=body()) as other:
            streams = [events(one), events(other)]  # each engine has one of them
            for stream in streams:
                for _ in range(5):
                    next(stream)
            first.kill()
            for stream in streams:
                for _ in range(100):
                    assert "error" not in next(stream)
        for _ in range(3):
            answer = client.post(ROUTE, json=body(stream=False, max_tokens=3))
            assert answer.status_code == 200
        assert second.poll() is None
