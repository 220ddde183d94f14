"""A real engine whose model has sliding windows: the gateway expects the cached tokens that the engine reports."""

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from proa_engine.config import EngineConfig
from proa_engine.executor import make_executor
from support.engine_server import RunningServer, running_server
from support.gateway import RunningGateway, running_gateway
from support.routing import cached_tokens, in_sync
from support.tiny_models import make_tiny_model

NUM_BLOCKS = 150  # of 16 tokens: a few prompts of both tables
SHARED = list(range(200))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One layer of two has a window of 40 tokens."""
    folder = make_tiny_model(
        tmp_path_factory.mktemp("model"),
        "qwen2",
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=1,
        max_position_embeddings=1024,
    )
    choices: dict[str, Any] = {
        "device": "cpu",
        "block_size": 16,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": NUM_BLOCKS,
    }
    executor = make_executor(EngineConfig.from_options(model=str(folder), **choices), lambda text: None)
    with running_server(executor, tokenizer_folder=folder, step_timeout=60.0, **choices) as server:
        yield server


@pytest.fixture
async def gateways(server: RunningServer) -> AsyncIterator[list[RunningGateway]]:
    """Two gateways of the engine."""
    async with AsyncExitStack() as stack:
        address = f"127.0.0.1:{server.port}"
        running = [await stack.enter_async_context(running_gateway(address)) for _ in range(2)]
        await in_sync(running)
        yield running


async def test_a_shared_prefix_is_reused_from_its_third_request_on(gateways: list[RunningGateway]) -> None:
    first, second = gateways
    questions = [[*SHARED, *range(number, number + 50)] for number in range(0, 200, 50)]
    assert [await cached_tokens(first, question) for question in questions] == [(0, 0), (0, 0), (192, 192), (192, 192)]
    assert await cached_tokens(first, questions[0]) == (240, 240), "up to the prompt's end"
    await in_sync(gateways)
    assert await cached_tokens(second, questions[1]) == (240, 240)
    assert await cached_tokens(second, SHARED[:100]) == (0, 0), "no checkpoint in it"


async def test_expected_tokens_are_exact_while_blocks_and_checkpoints_are_evicted(
    gateways: list[RunningGateway],
) -> None:
    rng = random.Random(1)
    texts = [[rng.randrange(200) for _ in range(600)] for _ in range(4)]
    hits = []
    for _ in range(30):
        prompt = [
            *rng.choice(texts)[: rng.randrange(1, 600)],
            *(rng.randrange(200) for _ in range(rng.randrange(1, 60))),
        ]
        expected, reported = await cached_tokens(rng.choice(gateways), prompt, max_tokens=rng.randrange(1, 20))
        assert expected == reported
        hits.append(reported)
        await in_sync(gateways)
    assert any(hits)
    assert 0 in hits[10:]
