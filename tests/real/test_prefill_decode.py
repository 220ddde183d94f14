"""A real model's prompts are computed by a prefill engine and continued by a decode engine: tokens are those of
`transformers`."""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from support import real_model, real_texts
from support.gateway import RunningGateway, running_gateway, until
from support.processes import engine_process
from support.real_model import Record
from support.scrape import Scrape

NUM_PROMPT_TOKENS, NUM_TOKENS = 500, 16
USED_PREFILLS = ("proa_gateway_remote_prefills_total", frozenset({("outcome", "used")}))
SECONDS = 600.0  # far more than it takes, on a busy machine
ROLES = ("prefill", "decode")
FLAGS = (
    f"--model={real_model.FOLDER}",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=512",
    "--num-gpu-blocks-override=200",
    "--kv-offloading-size=0.5",
    "--kv-transfer-address=127.0.0.1:0",
)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    """Addresses of an engine of each role."""
    with ExitStack() as stack, ThreadPoolExecutor() as executor:

        def start(role: str) -> str:
            flags = (*FLAGS, f"--role={role}")
            engine = engine_process(*flags, env={"OMP_NUM_THREADS": "1"}, seconds=SECONDS)
            return stack.enter_context(engine)[1]

        yield list(executor.map(start, ROLES))


@pytest.fixture
async def gateway(engines: list[str]) -> AsyncIterator[RunningGateway]:
    async with running_gateway(*engines, ready=False, min_remote_prefill_tokens=100) as gateway:
        await until(lambda: sum(one.accepts_requests for one in gateway.gateway.pool.engines) == len(ROLES), SECONDS)
        yield gateway


async def test_tokens_through_a_prefill_and_a_decode_engine(gateway: RunningGateway, record: Record) -> None:
    texts = real_texts.long_prompts(real_model.tokenizer())
    prompts = [each[:NUM_PROMPT_TOKENS] for each in texts]

    def page() -> Scrape:
        return Scrape(gateway.gateway.metrics.render().decode())

    def used() -> float:
        return page().samples.get(USED_PREFILLS, 0)

    async def complete(prompt: list[int]) -> list[int]:
        body = {
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = await gateway.http.post("/v1/completions", json=body, timeout=SECONDS)
        assert response.status_code == 200, response.text
        token_ids: list[int] = response.json()["choices"][0]["token_ids"]
        return token_ids

    while not used():  # until both engines have computed a prompt, it is not known how long the other one may take
        await complete(texts[0][NUM_PROMPT_TOKENS : 2 * NUM_PROMPT_TOKENS])
        texts = texts[1:]
    before = used()
    answers = [await complete(prompt) for prompt in prompts]  # together, some would be computed sooner where they are
    judged = [real_model.judge(tuple(prompt), tuple(tokens)) for prompt, tokens in zip(prompts, answers, strict=True)]
    assert not any(each.num_wrong for each in judged)
    num_equal = sum(each.num_equal for each in judged)
    assert used() - before == len(prompts)
    fetched = page().value("proa_gateway_kv_fetched_tokens_total", kind="prefill")
    assert fetched >= len(prompts) * (NUM_PROMPT_TOKENS - 32)
    record(
        "greedy tokens through a prefill and a decode engine",
        f"{num_equal} of {NUM_TOKENS * len(prompts)} tokens equal; {fetched:,.0f} tokens of prompts fetched",
    )
