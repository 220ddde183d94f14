"""`/tokenize`, `/detokenize` and `/tokenizer_info` in vLLM's form, and other routes that ask no engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.fake_engine import CHAT_TEMPLATE, FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, chat_body, running_gateway, until
from support.tokenizers import byte_level_tokenizer

CHAT: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "naïve 😀"}]


def encode(text: str) -> list[int]:
    return list(byte_level_tokenizer().encode(text).ids)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two three"), max_model_len=321) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine, enable_tokenizer_info_endpoint=True) as gateway:
        yield gateway


async def post(gateway: RunningGateway, path: str, **body: Any) -> Any:
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(gateway: RunningGateway, path: str, status: int = 400, **body: Any) -> Any:
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("text", ["", "Hi", "naïve café, 12 €, 😀<eos>", "one two three four five " * 300])
async def test_a_texts_tokens_and_the_text_of_the_tokens(gateway: RunningGateway, text: str) -> None:
    answer = await post(gateway, "/tokenize", prompt=text, model="fake")
    tokens = encode(text)
    assert answer == {"count": len(tokens), "max_model_len": 321, "tokens": tokens, "token_strs": None}
    assert await post(gateway, "/detokenize", tokens=tokens, model="fake") == {"prompt": text}


@pytest.mark.parametrize("repeat", [1, 300])
async def test_token_strs_are_the_vocabularys_spellings(gateway: RunningGateway, repeat: int) -> None:
    text = "one 😀 two " * repeat
    answer = await post(gateway, "/tokenize", prompt=text, return_token_strs=True)
    assert answer["token_strs"] == byte_level_tokenizer().encode(text).tokens


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"opening": "So,"}},
        {"add_special_tokens": True},
    ],
)
async def test_a_chats_tokens_are_those_that_generation_sends(
    gateway: RunningGateway, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    answer = await post(gateway, "/tokenize", messages=CHAT, **fields)
    await post(gateway, "/v1/chat/completions", messages=CHAT, max_tokens=1, **fields)
    assert answer["tokens"] == prompt_ids(engine.requests[-1])
    assert answer["count"] == len(answer["tokens"])


async def test_the_gateways_chat_template_is_used_in_place_of_the_models(engine: FakeEngine) -> None:
    async with running_gateway(engine, chat_template="{{ eos_token }}{{ messages[0].content }}?") as gateway:
        tokens = (await post(gateway, "/tokenize", messages=CHAT))["tokens"]
        assert await post(gateway, "/detokenize", tokens=tokens) == {"prompt": "<eos>Hi?"}


async def test_requests_that_are_not_one_text_or_chat_are_refused(gateway: RunningGateway) -> None:
    assert "either prompt or messages" in (await refused(gateway, "/tokenize"))["message"]
    assert "either prompt or messages" in (await refused(gateway, "/tokenize", prompt="Hi", messages=CHAT))["message"]
    assert (await refused(gateway, "/tokenize", prompt=["Hi"]))["param"] == "prompt"
    assert (await refused(gateway, "/tokenize", messages=[]))["param"] == "messages"
    error = await refused(gateway, "/tokenize", prompt="Hi", chat_template_kwargs={"opening": "So,"})
    assert "chat_template_kwargs" in error["message"]


async def test_what_chats_refuse_is_refused(gateway: RunningGateway) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for fields in (
        {"documents": [{"text": "x"}]},
        {"functions": [tool]},
        {"mm_processor_kwargs": {"a": 1}},
        {"chat_template": "x"},
    ):
        error = await refused(gateway, "/tokenize", messages=CHAT, **fields)
        assert (error["code"], error["param"]) == ("unsupported_parameter", *fields)
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert (await refused(gateway, "/tokenize", messages=CHAT, **both))["param"] == "add_generation_prompt"


async def test_unknown_fields_are_named_in_a_header(gateway: RunningGateway) -> None:
    answer = await gateway.http.post("/tokenize", json={"prompt": "Hi", "bogus": 1, "tools": []})
    assert (answer.status_code, answer.headers["x-proa-ignored-fields"]) == (200, "bogus")


@pytest.mark.parametrize("tokens", [[-1], [2**31 - 1], [2**70], ["a"], None])
async def test_tokens_out_of_the_vocabulary_are_refused(gateway: RunningGateway, tokens: Any) -> None:
    assert (await refused(gateway, "/detokenize", tokens=tokens))["param"].startswith("tokens")


async def test_an_unknown_model_is_not_found(gateway: RunningGateway) -> None:
    for path, body in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [5]})):
        error = await refused(gateway, path, 404, model="gpt-4o", **body)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert (await gateway.http.get("/tokenizer_info?model=gpt-4o")).status_code == 404


async def test_tokenizers_work_while_no_engine_does(gateway: RunningGateway, engine: FakeEngine) -> None:
    await engine.stop()
    await until(lambda: not gateway.gateway.pool.ready)
    assert (await post(gateway, "/tokenize", prompt="Hi", model="fake"))["tokens"] == encode("Hi")


async def test_before_the_first_engine_is_up_the_service_is_unavailable() -> None:
    async with running_gateway("127.0.0.1:1", ready=False) as gateway:
        for fields in ({}, {"model": "fake"}):
            assert (await refused(gateway, "/tokenize", 503, prompt="Hi", **fields))["code"] == "engine_unavailable"


async def test_tokenizer_info_has_the_configuration_and_the_template() -> None:
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": {"content": "<eos>", "lstrip": False},
        "added_tokens_decoder": {"0": {"content": "<eos>", "special": True}},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "model_max_length": 10**30,
        "chat_template": [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "x"}],
    }
    files = {**FakeEngine().files, "tokenizer_config.json": json.dumps(config).encode()}
    async with (
        FakeEngine(files=files) as engine,
        running_gateway(engine, enable_tokenizer_info_endpoint=True) as gateway,
    ):
        assert (await gateway.http.get("/tokenizer_info")).json() == {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<eos>",
            "added_tokens_decoder": {"0": "<eos>"},
            "additional_special_tokens": ["<a>", "<b>"],
            "model_max_length": 10**30,
            "chat_template": CHAT_TEMPLATE,
        }


async def test_tokenizer_info_needs_its_flag(engine: FakeEngine) -> None:
    async with running_gateway(engine) as gateway:
        assert (await gateway.http.get("/tokenizer_info")).status_code == 404
        assert "/tokenizer_info" not in (await gateway.http.get("/openapi.json")).json()["paths"]


async def test_tokenizers_need_a_key_and_count_against_its_limits(engine: FakeEngine, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "a", "key": "sk-a", "requests_per_minute": 2}]}))
    async with running_gateway(engine, api_keys=keys, enable_tokenizer_info_endpoint=True) as gateway:
        for method, path in (("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info")):
            assert (await gateway.http.request(method, path, json={})).status_code == 401
        headers = {"authorization": "Bearer sk-a"}
        answers = [await gateway.http.post("/tokenize", json={"prompt": "Hi"}, headers=headers) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"


async def test_ping_is_answered_without_engines() -> None:
    async with running_gateway("127.0.0.1:1", ready=False) as gateway:
        for answer in (await gateway.http.get("/ping"), await gateway.http.post("/ping")):
            assert (answer.status_code, answer.content) == (200, b"")


async def test_load_counts_the_generation_requests_in_flight(gateway: RunningGateway, engine: FakeEngine) -> None:
    async def load() -> Any:
        return (await gateway.http.get("/load")).json()

    assert await load() == {"server_load": 0}
    engine.stuck = True
    requests = [asyncio.create_task(gateway.complete(n=n)) for n in (1, 3)]
    await until(lambda: len(engine.requests) == 4)
    assert await load() == {"server_load": 2}
    await asyncio.gather(*(request for request in requests if request.cancel()), return_exceptions=True)
    await until(lambda: not gateway.gateway.admission.bounds.num_requests)
    assert await load() == {"server_load": 0}


@pytest.mark.parametrize("is_plain", [False, True])
async def test_special_tokens_in_texts_of_chats_are_plain_text_by_flag(is_plain: bool) -> None:
    text = "one <eos> two \ufdd0"
    async with FakeEngine() as engine, running_gateway(engine, plain_special_tokens=is_plain) as gateway:
        body = (await gateway.chat(text, return_prompt_text=True)).json()
        assert (0 in prompt_ids(engine.requests[-1])) is not is_plain
        tokens = (await gateway.http.post("/tokenize", json=chat_body(text))).json()["tokens"]
        assert tokens == prompt_ids(engine.requests[-1])
        assert "one <eos> two" in body["prompt_text"]
        assert ("\ufdd0" in body["prompt_text"]) is not is_plain
        await gateway.complete(text)
        assert 0 in prompt_ids(engine.requests[-1])
