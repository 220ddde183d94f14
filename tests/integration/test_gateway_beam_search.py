"""Beam search over HTTP: vLLM's results, one request in limits, metrics and usage, and none that is left behind."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from proa.beam_search import BeamSearchParams
from proa.engine.v1 import core_pb2
from proa_engine import LLM
from support.beams import search
from support.engine_server import serving_model
from support.fake_engine import EOS, FakeEngine, Reply, prompt_ids
from support.gateway import RunningGateway, chat_body, running_gateway, until
from support.tiny_models import make_tiny_model
from support.tokenizers import byte_level_tokenizer

LETTERS = byte_level_tokenizer().encode("abcdefghijklmnopqrstuvwxyz").ids


def likeliest(tokens: Sequence[int]) -> int:
    """A letter that depends on all tokens before it."""
    return LETTERS[sum(token * (index + 1) for index, token in enumerate(tokens)) % len(LETTERS)]


def script(request: core_pb2.EngineCoreRequest) -> Reply:
    return Reply([likeliest(prompt_ids(request))], finish_reason=core_pb2.FINISH_REASON_LENGTH)


def next_logprobs(tokens: Sequence[int]) -> list[tuple[int, float]]:
    """Those of the fake engine."""
    first = likeliest(tokens)
    ids = [first, *(other for other in range(40) if other != first)]
    return [(token_id, -0.25 * (rank + 1)) for rank, token_id in enumerate(ids)]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(script=script)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as running:
        yield running


def expected(prompt: Sequence[int], width: int, max_tokens: int, **params: Any) -> list[list[int]]:
    found = search(BeamSearchParams(width, max_tokens, **params), prompt, next_logprobs, {EOS})
    return [list(each.tokens) for each in found]


@pytest.mark.parametrize("fields", [{}, {"length_penalty": 0.0}, {"length_penalty": 2.0}, {"ignore_eos": True}])
async def test_completions_are_the_best_beams(gateway: RunningGateway, fields: dict[str, Any]) -> None:
    response = await gateway.complete(
        "Hi", use_beam_search=True, n=3, max_tokens=5, return_token_ids=True, logprobs=1, **fields
    )
    body = response.json()
    assert response.status_code == 200, body

    tokens = expected(byte_level_tokenizer().encode("Hi").ids, 3, 5, **fields)
    assert [choice["token_ids"] for choice in body["choices"]] == tokens
    ends = ["stop" if each[-1] == EOS and "ignore_eos" not in fields else "length" for each in tokens]
    assert [choice["finish_reason"] for choice in body["choices"]] == ends
    assert [choice["stop_reason"] for choice in body["choices"]] == [EOS if end == "stop" else None for end in ends]
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == list(map(len, tokens))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == sum(map(len, tokens))


async def test_chats_and_several_prompts_are_searched(gateway: RunningGateway, engine: FakeEngine) -> None:
    chat = (await gateway.chat("Hi", use_beam_search=True, n=2, max_tokens=4, return_token_ids=True)).json()
    tokens = expected(chat["prompt_token_ids"], 2, 4)
    texts = [byte_level_tokenizer().decode([token for token in each if token != EOS]) for each in tokens]
    assert [choice["message"]["content"] for choice in chat["choices"]] == texts

    many = (
        await gateway.complete([[7, 8], [9]], use_beam_search=True, n=2, max_tokens=4, return_token_ids=True)
    ).json()
    found = [choice["token_ids"] for choice in many["choices"]]
    assert found == [*expected([7, 8], 2, 4), *expected([9], 2, 4)]
    assert many["usage"]["prompt_tokens"] == 3

    messages = [[{"role": "user", "content": text}] for text in ("Hi", "No")]
    body = {"model": "fake", "messages": messages, "use_beam_search": True, "max_tokens": 4, "return_token_ids": True}
    batch = (await gateway.http.post("/v1/chat/completions/batch", json=body)).json()
    assert [batch["choices"][0]["token_ids"]] == expected(chat["prompt_token_ids"], 1, 4)
    assert len(batch["choices"]) == 2
    assert not engine.num_unfinished


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"5": 3}}, "logit_bias"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"n": 11}, "n"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
    ],
)
async def test_what_beams_cannot_have_is_refused_by_name(
    gateway: RunningGateway, fields: dict[str, Any], param: str
) -> None:
    response = await gateway.complete("Hi", use_beam_search=True, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_without_beam_search_a_length_penalty_has_no_effect(gateway: RunningGateway) -> None:
    response = await gateway.complete("Hi", use_beam_search=False, length_penalty=2.0, max_tokens=1)
    assert response.status_code == 200
    assert "x-proa-ignored-fields" not in response.headers


async def test_a_true_engine_finds_what_the_offline_llm_finds_and_shares_prefixes(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    prompt = "A boat with two unlike hulls, longer than a block of the cache"
    llm = LLM(str(folder), dtype="float32", max_model_len=128, num_gpu_blocks_override=64)
    (found,) = llm.beam_search(prompt, BeamSearchParams(3, 8, length_penalty=0.5))
    outputs = [each.tokens[len(prompt) :] for each in found.sequences]
    with serving_model(folder, "tiny", dtype="float32", max_model_len=128, num_gpu_blocks_override=64) as port:
        async with running_gateway(f"127.0.0.1:{port}") as gateway:
            fields = {"use_beam_search": True, "n": 3, "max_tokens": 8, "length_penalty": 0.5}
            body = (await gateway.complete(prompt, model="tiny", return_token_ids=True, logprobs=2, **fields)).json()
            (engine,) = gateway.gateway.pool.engines
            await until(lambda: engine.load_stats.prefix_cache_hits > 48 * 3)  # 3 full blocks of the prompt, per beam

    assert [choice["token_ids"] for choice in body["choices"]] == outputs
    for choice, sequence in zip(body["choices"], found.sequences, strict=True):
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(sequence.cum_logprob, rel=1e-3)


async def test_a_client_that_disconnects_aborts_all_beams(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with running_gateway(engine) as gateway:
        asking = asyncio.create_task(gateway.complete("Hi", use_beam_search=True, n=3, max_tokens=50))
        await engine.until(lambda engine: engine.num_unfinished == 1)  # the first step has one beam
        await engine.step()
        await engine.until(lambda engine: engine.num_unfinished == 3)
        asking.cancel()
        await engine.until(lambda engine: engine.num_unfinished == 0)
        assert len(engine.aborted) == 3


async def test_a_search_counts_as_one_request(gateway: RunningGateway) -> None:
    await gateway.complete("Hi", use_beam_search=True, n=2, max_tokens=3)
    text = (await gateway.http.get("/metrics")).text

    assert count(text, "proa_gateway_requests_total") == 1
    assert count(text, "proa_gateway_finished_sequences_total") == 2


def count(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{"))


async def test_a_step_is_done_by_another_engine_if_its_engine_is_lost() -> None:
    engines = [FakeEngine(script=script), FakeEngine(script=script)]
    for each in engines:
        each.step_delay = 0.01
        await each.start()
    try:
        async with running_gateway(*engines) as gateway:
            body = chat_body("Hi", use_beam_search=True, n=2, max_tokens=30, ignore_eos=True, return_token_ids=True)
            asking = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body))
            await until(lambda: any(each.num_unfinished for each in engines))
            await next(each for each in engines if each.num_unfinished).stop()
            answer = (await asking).json()
        found = [choice["token_ids"] for choice in answer["choices"]]
        assert found == expected(answer["prompt_token_ids"], 2, 30, ignore_eos=True)
    finally:
        for each in engines:
            await each.stop()
