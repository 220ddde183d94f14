"""A prefill engine and two decode engines with the built-in model, as processes, behind a gateway: the texts are those
of one engine, also when the prefill engine is killed and a decode engine drains.
"""

import asyncio
import json
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from support.gateway import RunningGateway, running_gateway, until
from support.processes import engine_process, free_port, kill_with_children
from support.scrape import Scrape

NUM_STREAMS = 6
NUM_TOKENS = 200  # a stream still runs when its engine drains, on a busy machine too
FLAGS = ("--model=builtin", "--kv-cache-memory-bytes=67108864", "--kv-offloading-size=0.2")
ROLES = ("prefill", "decode", "decode")


class Engines:
    """The prefill engine first. `start` waits until the model is loaded."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.ports = [free_port() for _ in ROLES]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        with ThreadPoolExecutor() as executor:
            list(executor.map(self.start, range(len(ROLES))))

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    def start(self, which: int) -> None:
        transfer = ("--kv-transfer-address=127.0.0.1:0", f"--role={ROLES[which]}")
        engine = engine_process(*FLAGS, *transfer, port=self.ports[which], env={"OMP_NUM_THREADS": "1"})
        self.processes[which], _ = self._stack.enter_context(engine)

    def kill(self, which: int) -> None:
        kill_with_children(self.processes[which].pid)
        self.processes[which].wait()

    def restart(self, which: int) -> None:
        self.processes[which].wait(60)
        self.start(which)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(stack)


@pytest.fixture
async def gateway(engines: Engines) -> AsyncIterator[RunningGateway]:
    async with running_gateway(*engines.addresses, ready=False, min_remote_prefill_tokens=200) as gateway:
        await until(lambda: num_ready(gateway) == len(ROLES), 60)
        yield gateway


def num_ready(gateway: RunningGateway) -> int:
    return sum(one.accepts_requests for one in gateway.gateway.pool.engines)


def prompt(index: int) -> list[int]:
    return [5 + (index * 31 + position * position) % 300 for position in range(700 + 40 * index)]


async def stream(http: httpx.AsyncClient, index: int, salt: str, on_token: Callable[[], None] = lambda: None) -> str:
    """Return the text of the stream. Prompts of another `salt` are not cached."""
    body = {
        "prompt": prompt(index),
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
    }
    text = ""
    async with http.stream("POST", "/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                on_token()
    return text


async def streams(gateway: RunningGateway, salt: str, on_token: Callable[[], None] = lambda: None) -> list[str]:
    return await asyncio.gather(*(stream(gateway.http, index, salt, on_token) for index in range(NUM_STREAMS)))


@pytest.fixture(scope="module")
def remembered() -> list[str]:
    return []


@pytest.fixture
async def expected(engines: Engines, remembered: list[str]) -> list[str]:
    """The texts of one decode engine alone."""
    if not remembered:
        async with running_gateway(engines.addresses[1]) as alone:
            remembered += [await stream(alone.http, index, "alone") for index in range(NUM_STREAMS)]
    return remembered


def value(gateway: RunningGateway, name: str, **labels: str) -> float:
    page = Scrape(gateway.gateway.metrics.render().decode())
    return page.value(name, **labels) if name in page.names else 0.0


async def test_prompts_come_from_the_prefill_engine_and_texts_are_those_of_one_engine(
    gateway: RunningGateway, expected: list[str]
) -> None:
    for index, text in enumerate(expected):
        assert await stream(gateway.http, index, "in turn") == text
    assert await streams(gateway, "together") == expected
    assert value(gateway, "proa_gateway_remote_prefills_total", outcome="used") >= NUM_STREAMS
    assert value(gateway, "proa_gateway_kv_fetched_tokens_total", kind="prefill") >= 600 * NUM_STREAMS
    assert gateway.gateway.pool.exchange.num_open == 0


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_fails_when_the_prefill_engine_is_killed(
    gateway: RunningGateway, engines: Engines, expected: list[str], seed: int
) -> None:
    running = asyncio.create_task(streams(gateway, f"killed {seed}"))
    await asyncio.sleep(random.Random(seed).uniform(0.0, 0.6))
    engines.kill(0)
    assert await running == expected
    assert gateway.gateway.pool.exchange.num_open == 0
    await asyncio.to_thread(engines.restart, 0)


async def test_streams_of_a_decode_engine_that_drains_move_with_their_blocks(
    gateway: RunningGateway, engines: Engines, expected: list[str]
) -> None:
    num_tokens = 0

    def count() -> None:
        nonlocal num_tokens
        num_tokens += 1

    running = asyncio.create_task(streams(gateway, "drained", count))
    await until(lambda: num_tokens > 10 * NUM_STREAMS, 60)
    engines.processes[1].send_signal(signal.SIGTERM)
    assert await running == expected
    assert value(gateway, "proa_gateway_moved_sequences_total", reason="drain") > 0
    assert value(gateway, "proa_gateway_kv_fetched_tokens_total", kind="drain") > 0
    assert not value(gateway, "proa_gateway_failovers_total")
    await asyncio.to_thread(engines.processes[1].wait, 30)
