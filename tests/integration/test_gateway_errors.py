"""Error responses: OpenAI's error object with the status, the parameter and the reason."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from proa.engine.v1 import core_pb2, service_pb2
from proa_gateway.config import Deadlines
from proa_gateway.engines.client import THRESHOLD, BreakerState
from support.fake_engine import FakeEngine, Reply, prompt_ids, say
from support.gateway import RunningGateway, chat_body, running_gateway
from support.sampling_params import OUT_OF_RANGE
from support.tokenizers import byte_level_tokenizer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two three"), max_model_len=100) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


TOOL = {"type": "function", "function": {"name": "f"}}
WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
    ({"request_id": "a b"}, "request_id", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content",
        "invalid_value",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
        "missing_required_parameter",
    ),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    *(({name: value}, name, "invalid_value") for name, value in OUT_OF_RANGE),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 0, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": "5.5"}, "max_completion_tokens", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 1000}, "n", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": ["a"] * 65}, "stop", "invalid_value"),
    ({"stop": 1}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop[0]", "invalid_value"),
    ({"stop": ["a", "\ud800"]}, "stop[1]", "invalid_value"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "invalid_value"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5000": 1}}, "logit_bias", "invalid_value"),
    ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value"),
    ({"stream": "perhaps"}, "stream", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": 5, "function": {"name": "f"}}]}, "tools[0]", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
        "tools[0].function.parameters",
        "invalid_value",
    ),
    ({"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "invalid_value"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_parameter"),
    ({"functions": [{}]}, "functions", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_parameter"),
    ({"use_beam_search": True, "stream": True}, "stream", "unsupported_parameter"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
    ({"documents": [{"text": "x"}]}, "documents", "unsupported_parameter"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
    ({"truncate_prompt_tokens": 101}, "truncate_prompt_tokens", "invalid_value"),
    ({"truncate_prompt_tokens": 0}, "messages", "invalid_value"),
    ({"truncation_side": "middle"}, "truncation_side", "invalid_value"),
    ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages", "context_length_exceeded"),
    ({"chat_template_kwargs": {"messages": 1, "unknown": [1]}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"x": [{"a": "\ud800"}]}}, "chat_template_kwargs.x", "invalid_value"),
    ({"messages": [{"role": "user", "content": "Hi", "name": "\ud800"}]}, "messages[0].name", "invalid_value"),
    ({"messages": [{"role": "user", "content": "Hi", "id": ["\ud800"]}]}, "messages[0].id", "invalid_value"),
    ({"messages": [{"role": "user", "content": "Hi", "\ud800": 1}]}, "messages[0]", "invalid_value"),
    ({"bad_words": ["\ud800"]}, "bad_words[0]", "invalid_value"),
    ({"user": "\ud800"}, "user", "invalid_value"),
    ({"cache_salt": "\ud800"}, "cache_salt", "invalid_value"),
    ({"logit_bias": {"\ud800": 1}}, "logit_bias", "invalid_value"),
]

WRONG_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt", "invalid_value"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value"),
    ({"prompt": ["a", "\ud800"], "echo": True}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": [512]}, "prompt", "invalid_value"),
    ({"prompt": [10**30]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 129}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": -1}, "logprobs", "invalid_value"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "invalid_value"),
    ({"logprobs": "many"}, "logprobs", "invalid_value"),
    ({"best_of": 3, "n": 2}, "best_of", "invalid_value"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "unsupported_parameter"),  # of an engine without them
    ({"prompt_embeds": "AAAA", "echo": True}, "echo", "unsupported_parameter"),
    ({"prompt": [1] * 100}, "prompt", "context_length_exceeded"),
]


async def test_errors_name_the_invalid_parameter(gateway: RunningGateway) -> None:
    for path, base, wrong in (
        (CHAT, chat_body(), WRONG_CHATS),
        (COMPLETIONS, {"model": "fake", "prompt": "Hi"}, WRONG_COMPLETIONS),
    ):
        for fields, param, code in wrong:
            body = json.dumps({**base, **fields})  # lone surrogates escaped, as clients may send them
            response = await gateway.http.post(path, content=body, headers={"content-type": "application/json"})
            error = error_of(response, 400)
            assert (error["param"], error["code"]) == (param, code), (fields, error)
            assert error["type"] == "invalid_request_error"


async def test_harmless_values_of_unsupported_and_unknown_fields_are_accepted(gateway: RunningGateway) -> None:
    fields: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "functions": None,
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "never_heard_of": 1,
        "logprobs": None,
        "stop": None,
        "logit_bias": None,
        "n": None,
    }
    assert (await gateway.chat(**fields)).status_code == 200
    assert (await gateway.chat(tool_choice="auto", logprobs=False, top_logprobs=0)).status_code == 200
    assert (await gateway.complete(suffix=None, best_of=1, user="me")).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": NaN'])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_that_is_not_a_json_object_is_rejected(gateway: RunningGateway, path: str, body: bytes) -> None:
    response = await gateway.http.post(path, content=body, headers={"content-type": "application/json"})
    error_of(response, 400)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 10_000, "nested too deeply"),
        (b"[" * 50_000, "depth limit exceeded"),
        (b'{"a": ' + b"9" * 5000, "too many digits"),
    ],
)
async def test_a_body_that_cannot_be_parsed_is_rejected_with_the_reason(
    gateway: RunningGateway, body: bytes, reason: str
) -> None:
    response = await gateway.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["code"] == "invalid_json"
    assert reason in error["message"]


async def test_a_compressed_body_is_rejected_with_its_encoding(gateway: RunningGateway) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await gateway.http.post(CHAT, content=gzip.compress(json.dumps(chat_body()).encode()), headers=headers)
    error = error_of(response, 415)
    assert error["code"] == "unsupported_media_type"
    assert "Content-Encoding: gzip" in error["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None, "x" * 10_000])
async def test_a_body_with_another_content_type_is_rejected_with_the_header_to_use(
    gateway: RunningGateway, kind: str | None
) -> None:
    for path in (CHAT, COMPLETIONS):
        headers = {"content-type": kind} if kind else {}
        response = await gateway.http.post(path, content=json.dumps(chat_body()), headers=headers)
        error = error_of(response, 415)
        assert error["code"] == "unsupported_media_type"
        assert "Content-Type: application/json" in error["message"]
        assert len(error["message"]) < 200


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"1e999"])
async def test_numbers_that_are_not_finite_are_rejected(gateway: RunningGateway, value: bytes) -> None:
    body = b'{"model":"fake","prompt":"Hi","repetition_penalty":' + value + b"}"
    response = await gateway.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == "repetition_penalty"


async def test_max_tokens_0_without_echo_is_rejected(gateway: RunningGateway) -> None:
    for response in (await gateway.chat(max_tokens=0), await gateway.complete(max_tokens=0)):
        message = error_of(response, 400)["message"]
        assert all(word in message for word in ("at least 1", "completions", "echo"))


async def test_an_unknown_model_is_not_found(gateway: RunningGateway) -> None:
    for response in (
        await gateway.chat(model="gpt-4o"),
        await gateway.complete(model="gpt-4o"),
        await gateway.http.get("/v1/models/gpt-4o"),
    ):
        error = error_of(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "gpt-4o" in error["message"]


async def test_wrong_paths_and_methods_are_openai_errors(gateway: RunningGateway) -> None:
    error_of(await gateway.http.get("/v2/nothing"), 404)
    response = await gateway.http.get(CHAT)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_rejected(engine: FakeEngine, chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b" " * 500

    async with running_gateway(engine, max_body_bytes=1000) as gateway:
        content: Any = parts() if chunked else b" " * 2000
        response = await gateway.http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert error_of(response, 413)["code"] == "request_too_large"
        assert (await gateway.chat()).status_code == 200


async def test_the_openai_client_raises_its_own_errors(gateway: RunningGateway) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.BadRequestError) as bad:
        await gateway.openai.chat.completions.create(model="fake", messages=messages, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.chat.completions.create(model="other", messages=messages)


async def test_messages_that_the_template_rejects_are_an_invalid_request() -> None:
    async with FakeEngine() as engine:
        config = b'{"chat_template": "{{ raise_exception(\'roles must alternate\') }}"}'
        files = {**engine.files, "tokenizer_config.json": config}
    async with FakeEngine(files=files) as engine, running_gateway(engine) as gateway:
        error = error_of(await gateway.chat(), 400)
        assert error["param"] == "messages"
        assert "roles must alternate" in error["message"]


async def test_template_variables_may_have_any_name(gateway: RunningGateway, engine: FakeEngine) -> None:
    variables = {"self": 1, "raise_exception": 2, "bos_token": 3, "opening": "Hm, ", "": {}, "range": None}
    assert (await gateway.chat(chat_template_kwargs=variables)).status_code == 200
    assert byte_level_tokenizer().decode(prompt_ids(engine.requests[-1])) == "user: Hi\nassistant: Hm, "


async def test_values_that_make_the_template_fail_are_an_invalid_request(gateway: RunningGateway) -> None:
    error = error_of(await gateway.chat(chat_template_kwargs={"opening": ["Hm"]}), 400)
    assert error["param"] == "messages"
    assert "chat template" in error["message"]


async def test_a_model_without_a_template_serves_completions_only() -> None:
    async with FakeEngine() as engine:
        files = {"tokenizer.json": engine.files["tokenizer.json"]}
    async with FakeEngine(files=files) as engine, running_gateway(engine) as gateway:
        assert "chat template" in error_of(await gateway.chat(), 400)["message"]
        assert (await gateway.complete()).status_code == 200


async def test_without_an_engine_everything_but_health_is_unavailable() -> None:
    async with running_gateway("127.0.0.1:1", ready=False) as gateway:
        response = await gateway.chat()
        assert error_of(response, 503)["code"] == "engine_unavailable"
        assert response.headers["retry-after"] == "1"
        assert (await gateway.http.get("/ready")).status_code == 503
        assert (await gateway.http.get("/health")).status_code == 200
        assert (await gateway.http.get("/v1/models")).json()["data"] == []


@pytest.mark.parametrize(("code", "status"), [(3, 400), (8, 429), (14, 503)])
async def test_a_rejection_by_the_only_engine_sets_the_status(
    gateway: RunningGateway, engine: FakeEngine, code: int, status: int
) -> None:
    engine.rejection = service_pb2.Rejected(code=code, message="no room at all", retryable=code != 3)
    for stream in (False, True):
        response = await gateway.chat(stream=stream)
        assert "no room at all" in error_of(response, status)["message"]
    if status != 400:
        assert response.headers["retry-after"] == "1"


async def test_an_output_that_ends_with_an_error_fails_its_request_alone(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    reply = Reply([5, 5], finish_reason=core_pb2.FINISH_REASON_ERROR, error="the output left its grammar")
    engine.script = lambda request: reply
    for _ in range(THRESHOLD + 1):
        error = error_of(await gateway.chat(), 400)
        assert (error["message"], error["code"]) == ("the output left its grammar", "grammar_failed")
    *_, last, _done = await gateway.events(CHAT, chat_body())
    assert (last["error"]["message"], last["error"]["code"]) == ("the output left its grammar", "grammar_failed")
    assert len(engine.requests) == THRESHOLD + 2  # none was sent again
    assert [client.breaker_state for client in gateway.gateway.pool.engines] == [BreakerState.CLOSED]


async def test_an_output_that_the_engine_aborted_has_finish_reason_abort(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    engine.script = lambda request: Reply([5], finish_reason=core_pb2.FINISH_REASON_ABORT)
    assert (await gateway.chat()).json()["choices"][0]["finish_reason"] == "abort"


async def test_overload_is_rejected_at_once_until_requests_end(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with running_gateway(engine, max_concurrent_requests=2) as gateway:
        waiting = [asyncio.create_task(gateway.complete([1] * 20, max_tokens=1)) for _ in range(2)]
        await engine.until(lambda engine: engine.num_unfinished == 2)
        response = await gateway.complete([1] * 20, max_tokens=1)
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
        await engine.step()
        assert [(await each).status_code for each in waiting] == [200, 200]
        engine.step_delay = 0.0
        assert (await gateway.complete([1] * 20, max_tokens=1)).status_code == 200


async def test_a_request_with_more_choices_than_the_limit_is_rejected(engine: FakeEngine) -> None:
    async with running_gateway(engine, max_concurrent_requests=3) as gateway:
        error_of(await gateway.chat(n=4), 429)
        assert (await gateway.chat(n=3)).status_code == 200


async def test_a_missing_first_token_ends_with_a_timeout(engine: FakeEngine) -> None:
    engine.step_delay = None
    deadlines = Deadlines(first_token=0.4, next_token=0.4)
    async with running_gateway(engine, deadlines=deadlines) as gateway:
        assert error_of(await gateway.chat(), 504)["code"] == "engine_timeout"
        await engine.until(lambda engine: engine.num_unfinished == 0)


async def test_a_missing_next_token_ends_a_stream_with_an_error_event(engine: FakeEngine) -> None:
    engine.step_delay = None
    deadlines = Deadlines(first_token=20, next_token=0.4)
    async with running_gateway(engine, deadlines=deadlines) as gateway:
        stream = asyncio.create_task(gateway.events(CHAT, chat_body()))
        await engine.until(lambda engine: engine.num_unfinished == 1)
        await engine.step()
        events = await stream
        assert events[-2]["error"]["code"] == "engine_timeout"
        assert events[-1] == "[DONE]"
        await engine.until(lambda engine: engine.num_unfinished == 0)
