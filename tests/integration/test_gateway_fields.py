"""Fields of a request that are coerced, refused or ignored, and request ids."""

import json
import logging
from collections.abc import AsyncIterator
from itertools import cycle
from typing import Any

import pytest

from proa_gateway.apis.chat.protocol import ChatCompletionRequest
from proa_gateway.apis.completions.protocol import CompletionRequest
from proa_gateway.serving.ignored_fields import NO_EFFECT, REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS
from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, chat_body, running_gateway
from support.tokenizers import byte_level_tokenizer

IGNORED = "x-proa-ignored-fields"


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two three")) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


async def test_numbers_are_coerced_as_vllm_does(gateway: RunningGateway, engine: FakeEngine) -> None:
    response = await gateway.chat(max_tokens=2.0, temperature="0.5", n="2", logprobs=1, stop_token_ids=["9"])
    assert response.status_code == 200, response.text
    params = engine.requests[0].sampling_params
    assert (params.max_tokens, params.temperature, list(params.stop_token_ids)) == (2, 0.5, [9])
    assert len(response.json()["choices"]) == 2


async def test_empty_settings_leave_the_answer_as_it_is(gateway: RunningGateway) -> None:
    plain = (await gateway.chat()).json()["choices"]
    response = await gateway.chat(stop="", stream_options={}, user="", tool_choice="", temperature="")
    assert response.json()["choices"] == plain


@pytest.mark.parametrize(
    ("role", "written"),
    [
        ("function", "function: 5"),
        ("critic", "critic: 5"),
        ("ipython", "ipython: 5"),
        ("tool", "user: [result of a tool]\n5"),  # the template reads no calls
    ],
)
async def test_a_message_may_have_any_role(
    gateway: RunningGateway, engine: FakeEngine, role: str, written: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": role, "tool_call_id": "1", "content": "5"}]
    assert (await gateway.chat(messages=messages)).status_code == 200
    assert byte_level_tokenizer().decode(prompt_ids(engine.requests[0])).startswith(f"user: Hi\n{written}\n")


@pytest.mark.parametrize(
    ("path", "base", "refused"),
    [
        ("/v1/chat/completions", chat_body(), REFUSED_IN_CHAT),
        ("/v1/completions", {"model": "fake", "prompt": "Hi"}, REFUSED_IN_COMPLETIONS),
    ],
)
async def test_refused_fields_are_refused_by_name_and_their_neutral_values_are_not(
    gateway: RunningGateway, path: str, base: dict[str, Any], refused: Any
) -> None:
    for (name, rule), value in zip(refused.items(), cycle(("x", {"y": [0.5]}, 7, ["z"])), strict=False):
        response = await gateway.http.post(path, json={**base, name: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
        assert error["message"].startswith(f"{name} is not supported: ")
        assert rule.accepts(None)
    neutral = {name: rule.neutral[-1] if rule.neutral else None for name, rule in refused.items()}
    response = await gateway.http.post(path, json={**base, **neutral, "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert IGNORED not in response.headers


def test_a_field_is_supported_refused_or_without_effect_and_only_one_of_them() -> None:
    for model, refused in ((ChatCompletionRequest, REFUSED_IN_CHAT), (CompletionRequest, REFUSED_IN_COMPLETIONS)):
        assert not model.model_fields.keys() & refused.keys()
        assert not model.model_fields.keys() & NO_EFFECT.keys()
        assert not refused.keys() & NO_EFFECT.keys()


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named_in_a_header_and_logged_once(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    fields: dict[str, Any] = {"tempreature": 0.1, "a, b\r\n": 1, "é": 2, "store": True}
    options: dict[str, Any] = {"stream_options": {"include_usage": True, "pace": 2}} if stream else {}
    content = json.dumps(chat_body(stream=stream, **fields, **options))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            response = await gateway.http.post(
                "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
            )
    assert response.status_code == 200
    names = response.headers[IGNORED].split(", ")
    assert names[:3] == ["tempreature", "a%2C%20b%0D%0A", "%C3%A9"]
    assert ("stream_options.pace" in names) is stream
    assert "store" not in names
    assert len([record for record in caplog.records if "'tempreature'" in record.getMessage()]) == 1


async def test_many_and_long_unknown_fields_make_a_short_header(gateway: RunningGateway) -> None:
    fields: dict[str, Any] = {f"{number}" * 500: 1 for number in range(900)}
    response = await gateway.chat(**fields)
    assert response.status_code == 200
    assert 0 < len(response.headers[IGNORED]) < 4096


async def test_the_request_id_is_used_and_returned_by_every_response(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        assert len((await gateway.http.get(path)).headers["x-request-id"]) == 32
        response = await gateway.http.get(path, headers={"X-Request-Id": "Custom"})
        assert response.headers["x-request-id"] == "Custom"
    for stream in (False, True):
        body = chat_body(stream=stream, request_id="mine")
        for headers, expected in (({}, "mine"), ({"x-request-id": "theirs"}, "theirs")):
            response = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
            assert response.headers["x-request-id"] == expected
            assert f'"id":"chatcmpl-{expected}"' in response.text
            assert engine.requests[-1].request_id.startswith(f"chatcmpl-{expected}-")
    response = await gateway.complete()
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


async def test_a_request_id_that_is_no_id_is_replaced(gateway: RunningGateway) -> None:
    for sent in ("x" * 129, "a b", "é"):
        response = await gateway.http.get("/health", headers=[(b"x-request-id", sent.encode("latin-1"))])
        assert len(response.headers["x-request-id"]) == 32


async def test_two_running_requests_may_have_the_same_id(gateway: RunningGateway, engine: FakeEngine) -> None:
    for _ in range(2):
        await gateway.chat(request_id="same", n=2)
    assert len({request.request_id for request in engine.requests}) == 4


async def test_requests_of_a_session_share_their_engine(gateway: RunningGateway) -> None:
    for fields in ({"session_id": "s"}, {"prompt_cache_key": "s"}, {"user": "s"}):
        assert (await gateway.chat(**fields)).status_code == 200


async def test_all_keys_of_logit_bias_that_are_no_token_ids_are_named(gateway: RunningGateway) -> None:
    message = (await gateway.chat(logit_bias={"bad1": 1, "5": 1, "-2": 1})).json()["error"]["message"]
    assert "'bad1', '-2'" in message


async def test_the_openapi_document_has_no_status_that_is_never_sent(gateway: RunningGateway) -> None:
    paths = (await gateway.http.get("/openapi.json")).json()["paths"]
    assert not [path for path, routes in paths.items() for route in routes.values() if "422" in route["responses"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_variables_that_the_chat_template_does_not_use_are_named(gateway: RunningGateway, stream: bool) -> None:
    variables = {"opening": "Hm", "enable_thinking": False}
    response = await gateway.chat(chat_template_kwargs=variables, stream=stream, unheard_of=1)
    assert response.status_code == 200
    assert response.headers[IGNORED] == "unheard_of, chat_template_kwargs.enable_thinking"
