"""Prompts computed by engines of the role prefill, and what becomes of requests if these fail."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from proa.engine.v1 import core_pb2, service_pb2
from support.chat_images import image_engine, image_part, user
from support.fake_engine import FakeEngine, say
from support.gateway import PATIENT, RunningGateway, running_gateway, until
from support.otlp import OtlpReceiver
from support.routing import in_sync
from support.scrape import Scrape

PROMPT = [5 + index % 200 for index in range(2000)]
NUM_CACHED = 1984  # all blocks before the last token
"""Tokens of the blocks that another engine can compute."""


class Engines:
    """A prefill engine and decode engines that exchange blocks."""

    def __init__(self, prefill: FakeEngine, decode: list[FakeEngine]) -> None:
        self.prefill = prefill
        self.decode = decode

    @property
    def first(self) -> FakeEngine:
        return self.decode[0]


@asynccontextmanager
async def running(num_decode: int = 1, **settings: Any) -> AsyncIterator[tuple[RunningGateway, Engines]]:
    movers: dict[str, FakeEngine] = {}
    async with AsyncExitStack() as stack:
        prefill = FakeEngine(movers=movers, role=service_pb2.ROLE_PREFILL)
        decode = [FakeEngine(movers=movers, role=service_pb2.ROLE_DECODE, max_loras=1) for _ in range(num_decode)]
        for engine in (prefill, *decode):
            engine.prefill_rate = 1000.0
            await stack.enter_async_context(engine)
        gateway = await stack.enter_async_context(running_gateway(prefill, *decode, **settings))
        await until(lambda: all(one.num_kv_subscriptions for one in (prefill, *decode)))
        yield gateway, Engines(prefill, decode)


async def complete(gateway: RunningGateway, prompt: Sequence[int] = PROMPT, **fields: object) -> int:
    """Return the cached tokens of the prompt, as the client is told."""
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}
    answer = await gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == 2 * len(answer.json()["choices"])
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def outcomes(gateway: RunningGateway) -> dict[str, float]:
    page = Scrape((await gateway.http.get("/metrics")).text)
    name = "proa_gateway_remote_prefills_total"
    return {dict(labels)["outcome"]: value for (found, labels), value in page.samples.items() if found == name}


def plain(request: core_pb2.EngineCoreRequest) -> bool:
    return not request.prefill_only and not request.HasField("kv_source")


async def test_a_long_prompt_is_computed_by_the_prefill_engine() -> None:
    async with running() as (gateway, engines):
        assert await complete(gateway) == 0, "nothing was cached for the client before"
        (prefill,), (decode,) = engines.prefill.requests, engines.first.requests
        assert prefill.prefill_only
        assert prefill.prompt_token_ids == decode.prompt_token_ids
        assert not decode.prefill_only
        assert list(decode.kv_source.addresses) == [engines.prefill.address]
        assert decode.kv_source.wait_ms >= 2000
        assert prefill.request_id != decode.request_id
        assert engines.prefill.num_computed_tokens == len(PROMPT)
        assert engines.first.num_computed_tokens == len(PROMPT) - NUM_CACHED
        assert await outcomes(gateway) == {"used": 1}
        assert not gateway.gateway.pool.exchange.num_open
        page = Scrape((await gateway.http.get("/metrics")).text)
        assert page.value("vllm:prompt_tokens_total", model_name="fake") == len(PROMPT)
        assert page.value("proa_gateway_kv_sources_total", kind="prefill") == 1


async def test_the_second_turn_is_fetched_by_the_prefill_engine_from_the_decode_engine() -> None:
    async with running() as (gateway, engines):
        await complete(gateway, PROMPT[:1500])
        cache, index = engines.prefill.prefix_cache, gateway.gateway.router.index.device
        assert cache is not None
        await in_sync([gateway])
        evicted = list(cache.blocks)
        cache.evict(evicted)
        await until(lambda: index.count_cached(engines.prefill.address, evicted) == 0)
        turn = [*PROMPT[:1500], *(7 + index % 50 for index in range(1500))]
        assert await complete(gateway, turn) == 1488
        prefill = engines.prefill.requests[-1]
        assert list(prefill.kv_source.addresses) == [engines.first.address]
        assert engines.prefill.num_computed_tokens == 1500 + len(turn) - 1488


async def test_short_prompts_and_those_that_are_cached_are_not_sent_to_the_prefill_engine() -> None:
    async with running() as (gateway, engines):
        await complete(gateway, PROMPT[:1000])
        await complete(gateway, PROMPT)  # lacks 1,008
        assert not engines.prefill.requests
    async with running(min_remote_prefill_tokens=500) as (gateway, engines):
        await complete(gateway, PROMPT[:1000])
        assert len(engines.prefill.requests) == 1


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 1}, {"cache_salt": "x", "prompt_logprobs": 0}],
)
async def test_requests_for_prompt_logprobs_are_not_paired(fields: dict[str, Any]) -> None:
    async with running() as (gateway, engines):
        await complete(gateway, **fields)
        assert not engines.prefill.requests
        assert all(map(plain, engines.first.requests))


async def test_a_busy_prefill_engine_is_not_used() -> None:
    async with running() as (gateway, engines):
        engines.prefill.foreign_tokens = 100_000
        (client,) = [one for one in gateway.gateway.pool.engines if one.accepts_prefills]
        await until(lambda: client.load_stats.num_waiting_tokens == 100_000)
        await complete(gateway)
        assert not engines.prefill.requests
        engines.prefill.foreign_tokens = 1000
        await until(lambda: client.load_stats.num_waiting_tokens == 1000)
        await complete(gateway, PROMPT[::-1])
        assert len(engines.prefill.requests) == 1
        assert engines.first.requests[-1].kv_source.wait_ms == 2000 + 1000 + round(1000 * NUM_CACHED / 1000)


async def test_the_prompts_of_concurrent_requests_count_before_the_engine_reports_them() -> None:
    async with running() as (gateway, engines):
        engines.prefill.step_delay = None
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(complete(gateway, [number, *PROMPT])))
            await until(lambda: len(engines.first.requests) == len(tasks))
        assert len(engines.prefill.requests) < 5
        engines.prefill.step_delay = 0.0
        await asyncio.gather(*tasks)


async def test_requests_that_wait_for_blocks_do_not_fill_their_engine() -> None:
    movers: dict[str, FakeEngine] = {}
    async with (
        FakeEngine(movers=movers, role=service_pb2.ROLE_PREFILL, step_delay=None) as prefill,
        FakeEngine(movers=movers, role=service_pb2.ROLE_DECODE, max_num_seqs=8) as decode,
        running_gateway(prefill, decode) as gateway,
    ):
        decode.prefill_rate, prefill.prefill_rate, decode.fetch_wait = 1000.0, 1e6, 30.0
        (client,) = [one for one in gateway.gateway.pool.engines if one.usable]
        await until(lambda: all(one.load_stats.prefill_tokens_per_second for one in gateway.gateway.pool.engines))
        tasks = [asyncio.create_task(complete(gateway, [number, *PROMPT])) for number in range(4)]
        await until(lambda: client.load_stats.num_waiting_reqs == 4)
        tasks += [asyncio.create_task(complete(gateway, [number, *PROMPT])) for number in range(4, 8)]
        await decode.until(lambda engine: len(engine.requests) == 8)
        prefill.step_delay = 0.0
        assert await asyncio.gather(*tasks) == [0] * 8
        assert decode.num_computed_tokens < 8 * 32


async def test_without_measured_rates_the_less_loaded_engine_computes_the_prompt() -> None:
    async with running() as (gateway, engines):
        for engine in (engines.prefill, engines.first):
            engine.prefill_rate = 0.0
        clients = {one.address: one for one in gateway.gateway.pool.engines}
        await until(lambda: not any(one.load_stats.prefill_tokens_per_second for one in clients.values()))
        await complete(gateway)
        assert len(engines.prefill.requests) == 1
        engines.prefill.foreign_load = 50
        await until(lambda: clients[engines.prefill.address].load == 50)
        await complete(gateway, PROMPT[::-1])
        assert len(engines.prefill.requests) == 1


async def test_choices_of_one_prompt_are_prefilled_once() -> None:
    async with running(num_decode=2) as (gateway, engines):
        engines.prefill.step_delay = None
        task = asyncio.create_task(complete(gateway, n=4, temperature=1.0))
        await until(lambda: sum(len(one.requests) for one in engines.decode) == 4)
        engines.prefill.step_delay = 0.0
        assert await task == 0
        assert len(engines.prefill.requests) == 1
        sources = [request.kv_source.addresses for one in engines.decode for request in one.requests]
        assert sources == [[engines.prefill.address]] * 4
        assert await outcomes(gateway) == {"used": 1}


async def test_a_dead_prefill_engine_fails_no_request() -> None:
    async with running() as (gateway, engines):
        engines.prefill.step_delay = None
        task = asyncio.create_task(complete(gateway))
        await engines.first.until(lambda engine: bool(engine.requests))
        await engines.prefill.stop()
        assert await task == 0
        assert engines.first.num_computed_tokens == len(PROMPT)
        assert await outcomes(gateway) == {"lost": 1}
        await complete(gateway, PROMPT[::-1])
        assert plain(engines.first.requests[-1])


async def test_what_a_prefill_engine_sent_before_it_was_killed_is_used() -> None:
    async with running() as (gateway, engines):
        engines.prefill.step_delay = None
        task = asyncio.create_task(complete(gateway))
        await engines.first.until(lambda engine: bool(engine.requests))
        cache = engines.prefill.prefix_cache
        assert cache is not None
        cache.store(cache.hashes(PROMPT[:800], ()))
        await asyncio.sleep(0.1)
        await engines.prefill.stop()
        assert await task == 0, "the prefill engine computed these tokens for this request"
        assert engines.first.num_computed_tokens == len(PROMPT) - 800


@pytest.mark.parametrize("code", [8, 14, 3])
async def test_a_prefill_engine_that_rejects_fails_no_request(code: int) -> None:
    async with running() as (gateway, engines):
        engines.first.fetch_wait = 0.1
        engines.prefill.rejection = service_pb2.Rejected(code=code, message="no", retryable=code != 3)
        assert await complete(gateway) == 0
        assert engines.first.num_computed_tokens == len(PROMPT)
        assert await outcomes(gateway) == {"rejected": 1}
        engines.prefill.rejection = None
        await complete(gateway, PROMPT[::-1])
        assert len(engines.prefill.requests) == (2 if code == 8 else 1), "a full queue is no reason to avoid the pair"


async def test_a_slow_prefill_engine_costs_the_wait() -> None:
    async with running() as (gateway, engines):
        engines.first.fetch_wait = 0.1
        engines.prefill.step_delay = None
        assert await complete(gateway) == 0
        await engines.prefill.until(lambda engine: bool(engine.aborted))
        assert engines.first.num_computed_tokens == len(PROMPT)
        assert await outcomes(gateway) == {"unused": 1}


async def test_a_client_that_goes_aborts_both_requests() -> None:
    async with running() as (gateway, engines):
        engines.prefill.step_delay = None
        task = asyncio.create_task(complete(gateway))
        await engines.first.until(lambda engine: bool(engine.requests))
        task.cancel()
        await engines.prefill.until(lambda engine: bool(engine.aborted))
        await engines.first.until(lambda engine: bool(engine.aborted))
        assert await outcomes(gateway) == {"aborted": 1}
        assert not gateway.gateway.pool.exchange.num_open


async def test_a_client_that_goes_while_the_prefill_engine_fetches_leaves_no_open_fetch() -> None:
    async with running() as (gateway, engines):
        await complete(gateway, PROMPT[:1000])
        await in_sync([gateway])
        engines.prefill.step_delay = None
        task = asyncio.create_task(complete(gateway, [*PROMPT[:1000], *PROMPT[:1500]]))
        await engines.prefill.until(lambda engine: bool(engine.requests))
        assert list(engines.prefill.requests[-1].kv_source.addresses) == [engines.first.address]
        task.cancel()
        await engines.prefill.until(lambda engine: bool(engine.aborted))
        assert await outcomes(gateway) == {"aborted": 1}
        assert not gateway.gateway.pool.exchange.num_open


async def test_a_request_that_needs_a_part_of_a_fetch_does_not_end_it() -> None:
    async with running() as (gateway, engines):
        engines.prefill.step_delay = None
        task = asyncio.create_task(complete(gateway))
        await engines.first.until(lambda engine: bool(engine.requests))
        cache = engines.prefill.prefix_cache
        assert cache is not None
        cache.store(cache.hashes(PROMPT[:800], ()))
        await complete(gateway, [*PROMPT[:800], *PROMPT[100::-1]])
        request = engines.first.requests[-1]
        assert (list(request.kv_source.addresses), request.kv_source.num_blocks) == ([engines.prefill.address], 50)
        assert not engines.prefill.aborted
        assert await outcomes(gateway) == {}
        engines.prefill.step_delay = 0.0
        assert await task == 800, "the prefill engine had these"
        assert await outcomes(gateway) == {"used": 1}
        assert not gateway.gateway.pool.exchange.num_open


async def test_a_request_whose_decode_engine_is_lost_is_prefilled_for_the_next_one() -> None:
    async with running(num_decode=2) as (gateway, engines):
        engines.prefill.step_delay = None
        task = asyncio.create_task(complete(gateway))
        await until(lambda: any(one.requests for one in engines.decode))
        holder, other = sorted(engines.decode, key=lambda one: -len(one.requests))
        await holder.stop()
        await other.until(lambda engine: bool(engine.requests))
        await engines.prefill.until(lambda engine: len(engine.requests) == 2)
        engines.prefill.step_delay = 0.0
        await task
        assert other.num_computed_tokens == len(PROMPT) - NUM_CACHED
        assert len({request.request_id for request in engines.prefill.requests}) == 2


async def test_stop_strings_end_a_request_with_a_remote_prefill() -> None:
    async with running() as (gateway, engines):
        engines.first.script = say("one two three four ", repeat=True)
        answer = await gateway.http.post(
            "/v1/completions", json={"prompt": PROMPT, "max_tokens": 100, "stop": ["three"]}
        )
        assert answer.json()["choices"][0]["text"] == "one two "
        await engines.first.until(lambda engine: engine.num_unfinished == 0)
        assert engines.prefill.num_unfinished == 0
        assert not gateway.gateway.pool.exchange.num_open


async def test_engines_of_the_role_prefill_alone_serve_no_model() -> None:
    async with (
        FakeEngine(movers={}, role=service_pb2.ROLE_PREFILL) as engine,
        running_gateway(engine, deadlines=replace(PATIENT, failover=0.5)) as gateway,
    ):
        assert not gateway.gateway.pool.ready
        answer = await gateway.complete(model="fake")
        assert answer.status_code == 503
        assert "role prefill" in answer.text
        assert not engine.requests


async def test_requests_wait_for_no_prefill_engine_after_the_last_decode_engine_is_lost() -> None:
    async with running() as (gateway, engines):
        engines.first.step_delay = None
        task = asyncio.create_task(gateway.http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}))
        await engines.first.until(lambda engine: bool(engine.requests))
        await engines.first.stop()
        assert (await asyncio.wait_for(task, 5)).status_code == 503
        assert not engines.prefill.requests


async def test_the_prefill_has_a_span_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        async with running() as (gateway, engines):
            await complete(gateway)
        spans = {span.name: span for span in receiver.spans}
    attempt, prefill = spans["Generate"], spans["Prefill"]
    assert attempt.parent_id == prefill.parent_id == spans["POST /v1/completions"].span_id
    assert attempt.attributes["proa.kv.source"] == engines.prefill.address
    assert attempt.attributes["proa.kv.fetched_tokens"] == NUM_CACHED
    assert prefill.attributes["gen_ai.operation.name"] == "prefill"
    assert prefill.attributes["server.port"] == int(engines.prefill.address.rpartition(":")[2])
    assert not prefill.failed
    (sent,) = engines.prefill.requests
    assert prefill.span_id in sent.trace_headers["traceparent"]


async def test_a_prefill_engine_without_the_adapter_is_not_used() -> None:
    async with running() as (gateway, engines):
        for engine in (engines.prefill, engines.first):
            engine.lora_folders["/adapters/sql"] = "digest"
        engines.first.loras["sql"] = service_pb2.Lora(name="sql", path="/adapters/sql", digest="digest")
        await engines.first.send_loras()
        models = gateway.gateway.models
        await until(lambda: models.loras.get("sql") is not None)
        await complete(gateway, model="sql")
        assert not engines.prefill.requests
        engines.prefill.loras["sql"] = engines.first.loras["sql"]
        await engines.prefill.send_loras()
        (client,) = [one for one in gateway.gateway.pool.engines if one.accepts_prefills]
        await until(lambda: client.loras.has_name("sql"))
        await complete(gateway, PROMPT[::-1], model="sql")
        (request,) = engines.prefill.requests
        assert (request.lora_name, request.lora_digest) == ("sql", "digest")


async def test_a_prefill_engine_with_a_shorter_context_limits_no_request() -> None:
    movers: dict[str, FakeEngine] = {}
    async with (
        FakeEngine(movers=movers, role=service_pb2.ROLE_DECODE) as decode,
        running_gateway(decode) as gateway,
        FakeEngine(movers=movers, role=service_pb2.ROLE_PREFILL, max_model_len=1500) as prefill,
    ):
        engines = {engine.address: engine.address for engine in (decode, prefill)}
        gateway.gateway.pool.set_engines(engines)
        await until(lambda: any(one.accepts_prefills for one in gateway.gateway.pool.engines))
        await complete(gateway)
        assert all(map(plain, decode.requests))
        await complete(gateway, PROMPT[1400::-1])
        assert len(prefill.requests) == 1


async def test_the_prefill_engine_gets_the_pixels_of_images_too() -> None:
    movers: dict[str, FakeEngine] = {}
    async with (
        image_engine(script=say("A cat."), movers=movers, role=service_pb2.ROLE_PREFILL) as prefill,
        image_engine(script=say("A cat."), movers=movers, role=service_pb2.ROLE_DECODE) as decode,
        running_gateway(prefill, decode, min_remote_prefill_tokens=16) as gateway,
    ):
        messages: Any = [user("What is this? " * 20, image_part(1))]
        await gateway.openai.chat.completions.create(model="fake", messages=messages)
        sizes = [
            [len(image.pixels) for image in request.images] for one in (prefill, decode) for request in one.requests
        ]
        assert len(sizes) == 2
        assert sizes[0] == sizes[1]
        assert sizes[0][0] > 0
