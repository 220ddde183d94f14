"""SGLang's `/generate` with a scripted engine."""

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest

from support.fake_engine import EOS, FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, events_of, running_gateway
from support.sampling_params import EXAMPLES
from support.tokenizers import byte_level_tokenizer


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two")) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


async def post(gateway: RunningGateway, sampling: Any = None, **fields: Any) -> httpx.Response:
    return await gateway.http.post("/generate", json={"sampling_params": sampling or {}, **fields})


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level_tokenizer().encode(text).ids
    return ids


async def events(gateway: RunningGateway, **fields: Any) -> list[Any]:
    async with gateway.http.stream("POST", "/generate", json={**fields, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        return [event async for event in events_of(response)]


async def test_a_text_is_continued(gateway: RunningGateway) -> None:
    body = (await post(gateway, text="Hi", rid="mine")).json()
    meta = body["meta_info"]
    assert body["text"] == "one two"
    assert body["output_ids"] == [*ids_of("one two"), EOS]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": len(ids_of("Hi")),
        "completion_tokens": len(ids_of("one two")) + 1,
        "cached_tokens": 0,
    }


async def test_token_ids_are_a_prompt(gateway: RunningGateway, engine: FakeEngine) -> None:
    assert (await post(gateway, input_ids=[5, 6, 7])).json()["meta_info"]["prompt_tokens"] == 3
    assert prompt_ids(engine.requests[0]) == [5, 6, 7]


async def test_a_batch_has_a_list_of_outputs(gateway: RunningGateway) -> None:
    texts = (await post(gateway, text=["a", "bc"], rid="r")).json()
    ids = (await post(gateway, input_ids=[[5], [6, 7]], rid=["x", "y"])).json()
    one = (await post(gateway, text=["a"])).json()
    assert [each["meta_info"]["id"] for each in texts] == ["r_0", "r_1"]
    assert [(each["meta_info"]["id"], each["meta_info"]["prompt_tokens"]) for each in ids] == [("x", 1), ("y", 2)]
    assert [each["text"] for each in one] == ["one two"]


async def test_several_choices_are_a_list(gateway: RunningGateway) -> None:
    body = (await post(gateway, {"n": 2}, text=["a", "b"], rid="r")).json()
    assert [each["meta_info"]["id"] for each in body] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
    assert len((await post(gateway, {"n": 3}, text="a")).json()) == 3


async def test_events_have_the_whole_text_so_far(gateway: RunningGateway) -> None:
    *parts, done = await events(gateway, text="Hi")
    whole = (await post(gateway, text="Hi")).json()
    assert done == "[DONE]"
    assert len(parts) > 2
    for first, second in itertools.pairwise(parts):
        assert second["text"].startswith(first["text"])
        assert first["meta_info"]["finish_reason"] is None
        assert first["meta_info"]["completion_tokens"] == len(first["output_ids"])
    for each in (parts[-1], whole):
        del each["meta_info"]["id"], each["meta_info"]["e2e_latency"]
    assert parts[-1] == whole


async def test_events_of_a_batch_name_their_output(gateway: RunningGateway) -> None:
    *parts, _ = await events(gateway, text=["a", "b"], rid="r")
    last = {part["index"]: part for part in parts}
    assert [last[index]["meta_info"]["id"] for index in (0, 1)] == ["r_0", "r_1"]
    assert [last[index]["text"] for index in (0, 1)] == ["one two"] * 2


async def test_the_end_is_told_as_sglang_does(gateway: RunningGateway) -> None:
    async def finish(**sampling: Any) -> Any:
        body = (await post(gateway, sampling, text="Hi")).json()
        return body["text"], body["meta_info"]["finish_reason"]

    assert await finish(max_new_tokens=2) == (
        byte_level_tokenizer().decode(ids_of("one two")[:2]),
        {"type": "length", "length": 2},
    )
    assert await finish(stop=[" two"]) == ("one", {"type": "stop", "matched": " two"})
    assert await finish(stop=" two", no_stop_trim=True) == ("one two", {"type": "stop", "matched": " two"})
    assert await finish(max_new_tokens=0) == ("", {"type": "length", "length": 0})


async def test_sampling_parameters_reach_the_engine(gateway: RunningGateway, engine: FakeEngine) -> None:
    others: dict[str, Any] = {"min_new_tokens": 2, "ignore_eos": True, "sampling_seed": 3}
    others |= {"stop_token_ids": [9], "logit_bias": {"7": 1.5}, "skip_special_tokens": False}
    assert (await post(gateway, EXAMPLES | others, text="Hi", priority=4)).is_success
    params, priority = engine.requests[0].sampling_params, engine.requests[0].priority
    assert {name: getattr(params, name) for name in EXAMPLES} == EXAMPLES
    assert (params.min_tokens, params.ignore_eos, list(params.stop_token_ids)) == (2, True, [9])
    assert (dict(params.logit_bias), priority, params.max_tokens) == ({7: 1.5}, -4, 128)


async def test_an_error_names_the_field_whatever_its_type(gateway: RunningGateway) -> None:
    response = await post(gateway, text="Hi", rid=[{}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "rid")


async def test_constraints_are_checked(gateway: RunningGateway) -> None:
    for name, value in (("json_schema", "{"), ("regex", "("), ("ebnf", "root")):
        response = await post(gateway, {name: value}, text="Hi")
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert (await post(gateway, {"regex": "[a-z ]+"}, text="Hi")).is_success


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"text": []}, "text: must be a string"),
        ({"text": ["a", 5]}, "text: must be a string"),
        ({"text": "\ud800"}, "text: must be valid Unicode"),
        ({"input_ids": [[]]}, "input_ids: must be a list of token ids"),
        ({"input_ids": [10**9]}, "input_ids: token id 1000000000"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid must have an id for each prompt"),
        ({"text": "a", "image_data": "a.png"}, "image_data is not supported: use /v1/chat"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob is not supported"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex is not supported"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num must not be above"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    gateway: RunningGateway, fields: dict[str, Any], message: str
) -> None:
    response = await gateway.http.post(
        "/generate", content=json.dumps(fields), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_unknown_fields_are_named_in_a_header(gateway: RunningGateway) -> None:
    response = await post(gateway, {"later": 1}, text="Hi", newer=2)
    assert response.headers["x-proa-ignored-fields"] == "newer, sampling_params.later"


async def test_log_probabilities_are_those_of_the_output(gateway: RunningGateway) -> None:
    meta = (await post(gateway, text="Hi", return_logprob=True)).json()["meta_info"]
    output = [*ids_of("one two"), EOS]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token_id, None] for token_id in output]
    assert all(entry[0] < 0 for entry in meta["output_token_logprobs"])
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_the_prompt_begin_where_asked(gateway: RunningGateway, stream: bool) -> None:
    fields = {"input_ids": [5, 6, 7, 8], "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    for start in (0, 2, 4):
        asked = {**fields, "logprob_start_len": start}
        body = (await events(gateway, **asked))[-2] if stream else (await post(gateway, **asked)).json()
        meta, ids = body["meta_info"], [5, 6, 7, 8][start:]
        texts = [byte_level_tokenizer().decode([token_id]) for token_id in ids]
        entries = meta["input_token_logprobs"]
        assert [entry[1:] for entry in entries] == [list(pair) for pair in zip(ids, texts, strict=True)]
        assert [entry[0] is None for entry in entries] == [True, False, False, False][: len(ids)]
        assert [tops and len(tops) for tops in meta["input_top_logprobs"]] == [None, 2, 2, 2][: len(ids)]
        assert [len(tops) for tops in meta["output_top_logprobs"]] == [2] * len(body["output_ids"])


async def test_a_prompt_is_scored_without_output(gateway: RunningGateway) -> None:
    scored = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0}
    body = (await post(gateway, {"max_new_tokens": 0}, **scored)).json()
    assert (body["text"], body["output_ids"], body["meta_info"]["output_token_logprobs"]) == ("", [], [])
    assert len(body["meta_info"]["input_token_logprobs"]) == 3


async def test_the_openapi_document_describes_the_responses(gateway: RunningGateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    schema = document["paths"]["/generate"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    for body in ({"text": "Hi", "return_logprob": True, "top_logprobs_num": 1}, {"text": ["a", "b"]}):
        value = (await gateway.http.post("/generate", json=body)).json()
        jsonschema.validate(value, schema | {"components": document["components"]})
