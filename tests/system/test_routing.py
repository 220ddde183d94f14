"""Routing with real engines: the cached tokens that the gateway expects are those that the engine reports."""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack

import pytest

from proa.blocks import hash_blocks
from proa_gateway.routing.policies import hash_chain
from support.gateway import RunningGateway, running_gateway, until
from support.processes import engine_process, free_port
from support.routing import HITS, cached_tokens, in_sync
from support.scrape import Scrape

NUM_BLOCKS = 40  # of 16 tokens: two prompts of 300 tokens do not fit beside each other in one engine's cache
ARGUMENTS = ("--model=builtin", "--max-model-len=512", "--max-num-batched-tokens=512")


class Engines:
    """Two engines with the built-in model, which can be restarted at their addresses."""

    def __init__(self) -> None:
        self._ports = [free_port(), free_port()]
        self._stacks = [ExitStack(), ExitStack()]
        self.addresses = [f"127.0.0.1:{port}" for port in self._ports]

    def start(self, number: int) -> None:
        command = (*ARGUMENTS, f"--num-gpu-blocks-override={NUM_BLOCKS}")
        env = {"OMP_NUM_THREADS": "1"}
        self._stacks[number].enter_context(engine_process(*command, port=self._ports[number], env=env))

    def stop(self, number: int) -> None:
        self._stacks[number].close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines()
    try:
        with ThreadPoolExecutor() as starting:
            list(starting.map(engines.start, range(2)))
        yield engines
    finally:
        for number in range(2):
            engines.stop(number)


@pytest.fixture
async def gateways(engines: Engines) -> AsyncIterator[list[RunningGateway]]:
    """Two gateways with the same engines."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_gateway(*engines.addresses)) for _ in range(2)]


def prompt(number: int, length: int = 300) -> list[int]:
    return [100 + (number * 7919 + position * position) % 900 for position in range(length)]


async def test_expected_cached_tokens_are_those_that_the_engine_reports(gateways: list[RunningGateway]) -> None:
    first, _ = gateways
    assert await cached_tokens(first, prompt(1)) == (0, 0)
    assert await cached_tokens(first, prompt(1)) == (288, 288), "18 of 18.75 blocks"
    assert await cached_tokens(first, prompt(1)[:160]) == (144, 144), "the last of ten full blocks is computed"
    assert await cached_tokens(first, prompt(1)[:100] + prompt(2)[:100]) == (96, 96)


async def test_a_gateway_expects_blocks_computed_for_another_gateway(gateways: list[RunningGateway]) -> None:
    first, second = gateways
    await cached_tokens(first, prompt(3))
    await in_sync(gateways)
    assert await cached_tokens(second, prompt(3)) == (288, 288)
    assert await cached_tokens(second, [*prompt(3), *prompt(4)[:100]]) == (288, 288)


async def test_evicted_blocks_are_not_expected(gateways: list[RunningGateway]) -> None:
    first, second = gateways
    for number in range(10, 18):  # more than both caches hold
        await cached_tokens(first, prompt(number))
    await in_sync(gateways)
    answers = [await cached_tokens(second, prompt(number)) for number in range(10, 18)]
    assert all(expected == reported for expected, reported in answers)
    assert (0, 0) in answers


async def test_no_blocks_are_expected_after_an_engine_restarts(
    gateways: list[RunningGateway], engines: Engines
) -> None:
    first, second = gateways
    await cached_tokens(first, prompt(20))
    [(_, [home])] = first.gateway.router.index.match(_hashes(first, prompt(20)))
    number = engines.addresses.index(home)
    engines.stop(number)
    engines.start(number)
    clients = [engine for gateway in gateways for engine in gateway.gateway.pool.engines]
    await until(lambda: all(client.usable for client in clients))
    await in_sync(gateways)
    assert await cached_tokens(second, prompt(20)) == (0, 0)
    assert await cached_tokens(second, prompt(20)) == (288, 288)
    await in_sync(gateways)
    assert await cached_tokens(first, prompt(20)) == (288, 288)


async def test_no_cached_tokens_are_expected_with_prompt_logprobs(gateways: list[RunningGateway]) -> None:
    first, _ = gateways
    await cached_tokens(first, prompt(40))
    assert await cached_tokens(first, prompt(40), echo=True, logprobs=1, max_tokens=0) == (0, 0)
    assert await cached_tokens(first, prompt(40), prompt_logprobs=0) == (0, 0)


async def test_prompts_with_different_cache_salts_share_no_blocks(gateways: list[RunningGateway]) -> None:
    first, _ = gateways
    salted = {"prompt": prompt(30), "max_tokens": 1, "cache_salt": "mine"}
    for cached in (0, 288):
        answer = await first.http.post("/v1/completions", json=salted)
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert await cached_tokens(first, prompt(30)) == (0, 0)


async def test_the_metrics_page_has_cache_hits_and_the_size_of_the_index(gateways: list[RunningGateway]) -> None:
    first, _ = gateways
    for _ in range(2):
        await cached_tokens(first, prompt(50))
    page = Scrape((await first.http.get("/metrics")).text)
    assert page.value(HITS, by="gateway") == page.value(HITS, by="engine") == 288
    assert page.value("proa_gateway_routing_index_blocks") == first.gateway.router.index.num_blocks
    assert page.value("proa_gateway_routing_index_bytes") > 0


def _hashes(gateway: RunningGateway, token_ids: list[int]) -> list[bytes]:
    chain = hash_chain(gateway.gateway.models.get(gateway.gateway.pool.model_names()[0]).info)
    return hash_blocks(chain.root, token_ids, chain.block_size)
