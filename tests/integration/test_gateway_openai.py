"""The OpenAI API, with OpenAI's client, in front of a fake engine with scripted replies."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from proa.contract import choice_key
from proa.engine.v1 import core_pb2
from proa_gateway.serving import generation_job
from support.fake_engine import EOS, FakeEngine, Reply, echo, prompt_ids, say
from support.gateway import RunningGateway, chat_body, running_gateway
from support.sampling_params import EXAMPLES
from support.tokenizers import byte_level_tokenizer

TEXT = "naïve café, 12 €, 😀 and 👩‍👩‍👧."


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say(TEXT)) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


def num_tokens(text: str) -> int:
    return len(byte_level_tokenizer().encode(text).ids)


def contents(events: list[Any], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events[:-1]
        for choice in event["choices"]
        if choice["index"] == index
    )


def finish_reasons(events: list[Any]) -> list[str]:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


async def test_chat_completion_is_the_engines_text(gateway: RunningGateway) -> None:
    answer = await gateway.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"


async def test_streamed_chat_completion_is_the_same_text_in_order(gateway: RunningGateway) -> None:
    stream = await gateway.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == num_tokens(TEXT) + 1
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("�" not in (chunk.choices[0].delta.content or "") for chunk in chunks[:-1])


async def test_every_stream_ends_with_done(gateway: RunningGateway) -> None:
    for path, body in (("chat/completions", chat_body()), ("completions", {"model": "fake", "prompt": "Hi"})):
        events = await gateway.events(f"/v1/{path}", body)
        assert events[-1] == "[DONE]"
        assert len(finish_reasons(events)) == 1


async def test_usage_counts_prompt_output_and_cached_tokens(gateway: RunningGateway, engine: FakeEngine) -> None:
    usage = (await gateway.chat(max_tokens=5)).json()["usage"]
    assert usage == {
        "prompt_tokens": len(prompt_ids(engine.requests[0])),
        "completion_tokens": 5,
        "total_tokens": len(prompt_ids(engine.requests[0])) + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_usage_is_in_every_event_only_on_request(gateway: RunningGateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await gateway.events("/v1/chat/completions", chat_body(max_tokens=4, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [0, 1, 2, 3, 4, 4]
    assert len({event["usage"]["prompt_tokens"] for event in events[:-1]}) == 1
    for unused in ({}, {"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}):
        events = await gateway.events("/v1/chat/completions", chat_body(max_tokens=4, stream_options=unused))
        assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_gateway_gives_usage_in_every_event_of_all_streams(engine: FakeEngine, path: str) -> None:
    async with running_gateway(engine, enable_force_include_usage=True) as gateway:
        for options in (None, {"include_usage": False}):
            body = chat_body(max_tokens=4, stream_options=options) | {"prompt": "Hi"}
            events = await gateway.events(path, body)
            assert [event["usage"]["completion_tokens"] for event in events[:-1]][-5:] == [1, 2, 3, 4, 4]
        response = await gateway.http.post(path, json=body | {"stream": False, "stream_options": None})
        assert response.json()["usage"]["completion_tokens"] == 4


async def test_chat_prompt_is_the_models_template_over_the_messages(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
    ]
    await gateway.http.post("/v1/chat/completions", json={"model": "fake", "messages": messages, "max_tokens": 1})
    prompt = byte_level_tokenizer().decode(prompt_ids(engine.requests[0]))
    assert prompt == "system: Be brief.\nuser: One.\nTwo.\nassistant: "


async def test_a_long_prompt_is_tokenized_off_the_event_loop_to_the_same_tokens(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    text = "one two three four five " * 200
    await gateway.complete(text, max_tokens=1)
    assert prompt_ids(engine.requests[0]) == byte_level_tokenizer().encode(text).ids


async def test_n_choices_are_n_engine_requests_with_different_keys(gateway: RunningGateway, engine: FakeEngine) -> None:
    answer = (await gateway.chat(n=3, seed=7, max_tokens=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids(engine.requests[0]))
    assert [request.sampling_params.key for request in engine.requests] == [choice_key(7, i) for i in range(3)]


async def test_streamed_choices_have_their_index(gateway: RunningGateway) -> None:
    events = await gateway.events("/v1/chat/completions", chat_body(n=2))
    assert contents(events, 0) == contents(events, 1) == TEXT
    assert finish_reasons(events) == ["stop", "stop"]


@pytest.mark.parametrize("fields", [{}, {"seed": -1}])
async def test_without_a_seed_keys_differ_between_requests(
    gateway: RunningGateway, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    for _ in range(2):
        await gateway.chat(max_tokens=1, **fields)
    first, second = engine.requests
    assert first.sampling_params.HasField("key")
    assert first.sampling_params.key != second.sampling_params.key


async def test_every_sampling_field_reaches_the_engine(gateway: RunningGateway, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {
        **EXAMPLES,
        "logit_bias": {"5": -100, "6": 2.5},
        "allowed_token_ids": [5, 6, 7],
        "max_completion_tokens": 3,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
        "bad_words": ["fox"],
        "speculative": False,
        "priority": -3,
        "cache_salt": "mine",
    }
    assert (await gateway.chat(**fields)).status_code == 200
    request = engine.requests[0]
    params = request.sampling_params
    assert {name: getattr(params, name) for name in EXAMPLES} == EXAMPLES
    assert params.min_tokens == fields["min_tokens"]
    assert params.max_tokens == 3
    assert dict(params.logit_bias) == {5: -100.0, 6: 2.5}
    assert list(params.allowed_token_ids) == [5, 6, 7]
    assert list(params.stop_token_ids) == [9]
    assert params.ignore_eos
    assert params.HasField("speculative")
    assert not params.speculative
    detection = params.repetition_detection
    assert (detection.max_pattern_size, detection.min_pattern_size, detection.min_count) == (4, 0, 3)
    encode = byte_level_tokenizer().encode
    assert [list(word.token_ids) for word in params.bad_words_token_ids] == [encode("fox").ids, encode(" fox").ids]
    assert (request.priority, request.cache_salt) == (-3, "mine")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["café, 12", ["nothing", "é, 1"], "€"])
async def test_text_ends_before_a_stop_string_that_spans_tokens(
    gateway: RunningGateway, engine: FakeEngine, stop: str | list[str], stream: bool
) -> None:
    found = stop if isinstance(stop, str) else stop[1]
    expected = TEXT[: TEXT.index(found)]
    if stream:
        events = await gateway.events("/v1/chat/completions", chat_body(stop=stop))
        assert contents(events) == expected
        assert finish_reasons(events) == ["stop"]
        choice = next(c for event in events[:-1] for c in event["choices"] if c["finish_reason"])
    else:
        choice = (await gateway.chat(stop=stop)).json()["choices"][0]
        assert choice["message"]["content"] == expected
    assert choice["stop_reason"] == found


async def test_a_stop_string_ends_the_request_in_the_engine_and_trims_usage(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    engine.script = say("one two three four five ", repeat=True)
    answer = (await gateway.chat(stop=" four", logprobs=True)).json()
    kept = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert "".join(kept) == answer["choices"][0]["message"]["content"] == "one two three"
    assert answer["usage"]["completion_tokens"] == len(kept)
    await engine.until(lambda engine: engine.num_unfinished == 0)
    assert len(engine.aborted) == 1


async def test_a_request_that_ends_by_itself_is_not_aborted(gateway: RunningGateway, engine: FakeEngine) -> None:
    await gateway.chat()
    await gateway.events("/v1/chat/completions", chat_body())
    assert engine.aborted == []


async def test_include_stop_str_keeps_the_stop_string(gateway: RunningGateway) -> None:
    answer = (await gateway.chat(stop="12", include_stop_str_in_output=True)).json()
    assert answer["choices"][0]["message"]["content"] == "naïve café, 12"


async def test_a_stop_token_is_the_stop_reason_and_its_text_is_omitted(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    ids = byte_level_tokenizer().encode("one two").ids
    engine.script = lambda request: Reply(ids, stop_reason=ids[-1])
    choice = (await gateway.chat(stop_token_ids=[ids[-1]])).json()["choices"][0]
    assert choice["message"]["content"] == byte_level_tokenizer().decode(ids[:-1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[-1])


async def test_an_output_that_repeats_itself_says_so(gateway: RunningGateway, engine: FakeEngine) -> None:
    ids = byte_level_tokenizer().encode("one one").ids
    engine.script = lambda request: Reply(ids, finish_reason=core_pb2.FINISH_REASON_REPETITION)
    choice = (await gateway.chat(repetition_detection={"max_pattern_size": 2, "min_count": 2})).json()["choices"][0]
    assert choice["message"]["content"] == "one one"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")


async def test_named_tokens_have_log_probabilities(gateway: RunningGateway, engine: FakeEngine) -> None:
    assert (await gateway.chat(logprobs=True, logprob_token_ids=[7, 300])).status_code == 200
    assert list(engine.requests[0].sampling_params.logprob_token_ids) == [7, 300]


async def test_the_sampled_token_is_beside_those_that_a_chat_names(gateway: RunningGateway) -> None:
    fields: dict[str, Any] = {"logprobs": True, "return_tokens_as_token_ids": True, "max_tokens": 1}
    for named in ([7, 300], None):
        (entry,) = (await gateway.chat(logprob_token_ids=named, **fields)).json()["choices"][0]["logprobs"]["content"]
        assert (entry["token"] in [top["token"] for top in entry["top_logprobs"]]) is (named is not None)


@pytest.mark.parametrize(("logprobs", "token_ids"), [(None, [7]), (True, [10**6]), (True, [1] * 129)])
async def test_wrong_named_tokens_are_refused(
    gateway: RunningGateway, logprobs: bool | None, token_ids: list[int]
) -> None:
    response = await gateway.chat(logprobs=logprobs, logprob_token_ids=token_ids)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("logprob_token_ids")


@pytest.mark.parametrize(
    "wrong", [{"max_pattern_size": 2, "min_count": 1}, {"max_pattern_size": 600, "min_count": 2}, {"size": 2}, 5]
)
async def test_a_wrong_repetition_detection_is_refused(gateway: RunningGateway, wrong: object) -> None:
    response = await gateway.chat(repetition_detection=wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("repetition_detection")


async def test_chat_logprobs_have_tokens_bytes_and_alternatives(gateway: RunningGateway, engine: FakeEngine) -> None:
    answer = await gateway.openai.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=3, max_tokens=6
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    assert logprobs.content[0].logprob == pytest.approx(-0.25)


async def test_streamed_logprobs_equal_those_of_one_response(gateway: RunningGateway) -> None:
    body = chat_body(logprobs=True, top_logprobs=1, seed=1)
    whole = (await gateway.chat(logprobs=True, top_logprobs=1, seed=1)).json()["choices"][0]
    events = await gateway.events("/v1/chat/completions", body)
    choices = [event["choices"][0] for event in events[:-1]]
    streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in streamed[:-1]).decode() == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_point_into_the_echoed_text(gateway: RunningGateway, stream: bool) -> None:
    body = {"model": "fake", "prompt": "The quick fox", "echo": True, "logprobs": 2, "max_tokens": 30}
    if stream:
        events = await gateway.events("/v1/completions", body)
        choices = [event["choices"][0] for event in events[:-1]]
        text = "".join(choice["text"] for choice in choices)
        lists: dict[str, list[Any]] = {
            name: [entry for choice in choices for entry in choice["logprobs"][name]]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        choice = (await gateway.http.post("/v1/completions", json=body)).json()["choices"][0]
        text, lists = choice["text"], choice["logprobs"]
    assert text.startswith("The quick foxnaïve café")
    assert len({len(entries) for entries in lists.values()}) == 1
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert all(value is not None for value in lists["token_logprobs"][1:])
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset : offset + len(token)] == token or token == "<eos>"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_max_tokens_0_is_the_prompt_and_its_logprobs(
    gateway: RunningGateway, engine: FakeEngine, stream: bool
) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "stop": "t", "max_tokens": 0, "return_token_ids": True}
    body = {"model": "fake", "prompt": ["The quick fox", "one"], "n": 2, **fields}
    if stream:
        events = await gateway.events("/v1/completions", body | {"stream_options": {"include_usage": True}})
        choices, usage = [event["choices"][0] for event in events[:-2]], events[-2]["usage"]
        choices.sort(key=lambda choice: choice["index"])
    else:
        answer = (await gateway.http.post("/v1/completions", json=body)).json()
        choices, usage = answer["choices"], answer["usage"]
    assert [choice["text"] for choice in choices] == ["The quick fox", "The quick fox", "one", "one"]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert {choice["stop_reason"] for choice in choices} == {None}
    assert [choice["token_ids"] for choice in choices] == [[]] * 4
    for choice in choices:
        lists = choice["logprobs"]
        assert "".join(lists["tokens"]) == choice["text"]
        assert {len(entries) for entries in lists.values()} == {num_tokens(choice["text"])}
        assert lists["token_logprobs"][0] is None
        assert None not in lists["token_logprobs"][1:]
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == usage["total_tokens"] == num_tokens("The quick fox") + num_tokens("one")
    assert [request.sampling_params.max_tokens for request in engine.requests] == [1] * 4


async def test_echo_with_max_tokens_0_without_logprobs_is_the_prompt(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    engine.script = lambda request: Reply([EOS])
    answer = await gateway.openai.completions.create(model="fake", prompt="The quick", echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("The quick", "length")
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("one two", 1), (["one", "two three"], 2), ([5, 6, 7], 1), ([[5, 6], [7], [8, 9]], 3), (["one", [5]], 2)],
)
async def test_prompts_are_texts_or_token_ids(
    gateway: RunningGateway, engine: FakeEngine, prompt: Any, num_prompts: int
) -> None:
    engine.script = echo
    answer = (await gateway.complete(prompt, n=2, max_tokens=50)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
    decode = byte_level_tokenizer().decode
    for index, choice in enumerate(answer["choices"]):
        sent = prompt_ids(engine.requests[index])
        assert choice["text"] == decode(sent)
    assert answer["usage"]["prompt_tokens"] == sum(len(prompt_ids(request)) for request in engine.requests[::2])


async def test_echo_of_token_ids_is_their_text(gateway: RunningGateway) -> None:
    ids = byte_level_tokenizer().encode("The quick").ids
    answer = await gateway.openai.completions.create(model="fake", prompt=ids, echo=True, max_tokens=1)
    assert answer.choices[0].text == "The quickn"


async def test_completions_default_to_sixteen_tokens(gateway: RunningGateway, engine: FakeEngine) -> None:
    engine.script = say("one two ", repeat=True)
    answer = (await gateway.complete()).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "count"),
    [({"prompt_logprobs": 2}, 18), ({"echo": True, "logprobs": 2}, 18), ({"prompt_logprobs": 2, "n": 2}, 36)],
)
async def test_more_prompt_logprobs_than_a_response_may_have_are_refused(
    fields: dict[str, Any], count: int, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    monkeypatch.setattr(generation_job, "MAX_PROMPT_LOGPROBS", count)
    assert (await gateway.complete(prompts, max_tokens=1, **fields)).status_code == 200

    monkeypatch.setattr(generation_job, "MAX_PROMPT_LOGPROBS", count - 1)
    answer = await gateway.complete(prompts, max_tokens=1, **fields)
    assert answer.status_code == 400
    assert f"2 alternatives to each are more than {count - 1}; send fewer prompts" in answer.json()["error"]["message"]


async def test_token_ids_and_prompt_logprobs_come_on_request(gateway: RunningGateway, engine: FakeEngine) -> None:
    answer = (await gateway.chat(return_token_ids=True, prompt_logprobs=1)).json()
    sent = prompt_ids(engine.requests[0])
    assert answer["prompt_token_ids"] == sent
    assert answer["choices"][0]["token_ids"] == [*byte_level_tokenizer().encode(TEXT).ids, EOS]
    assert len(answer["prompt_logprobs"]) == len(sent)
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1][str(sent[1])]["rank"] == 1


async def test_stream_interval_merges_tokens_into_one_event(engine: FakeEngine) -> None:
    engine.script = say("one two ", repeat=True)
    async with running_gateway(engine, stream_interval=4) as gateway:
        events = await gateway.events("/v1/chat/completions", chat_body(max_tokens=13))
        texts = [event["choices"][0]["delta"].get("content") for event in events[1:-1]]
        assert len(texts) == 4  # the first alone, then four by four
        assert contents(events) == byte_level_tokenizer().decode(
            (byte_level_tokenizer().encode("one two ").ids * 13)[:13]
        )


async def test_models_lists_the_engines_models(gateway: RunningGateway) -> None:
    models = [model async for model in gateway.openai.models.list()]
    assert [model.id for model in models] == ["fake"]
    assert (await gateway.openai.models.retrieve("fake")).owned_by == "proa"
    card = (await gateway.http.get("/v1/models")).json()["data"][0]
    assert (card["max_model_len"], card["thinking_switch"], card["reasoning_efforts"]) == (4096, None, [])
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert card["default_sampling_params"] == defaults
    async with gateway.anthropic_client() as claude:
        (model,) = [model async for model in claude.models.list()]
        assert model == await claude.models.retrieve("fake")
    assert (model.id, model.type, model.max_input_tokens) == ("fake", "model", 4096)


async def test_the_model_may_be_omitted_or_empty_if_there_is_one(gateway: RunningGateway) -> None:
    body = chat_body(max_tokens=1)
    del body["model"]
    for fields in ({}, {"model": None}, {"model": ""}):
        assert (await gateway.http.post("/v1/chat/completions", json=body | fields)).json()["model"] == "fake"


async def test_invocations_are_chats_or_completions(gateway: RunningGateway) -> None:
    chat = (await gateway.http.post("/invocations", json=chat_body())).json()
    completion = (await gateway.http.post("/invocations", json={"prompt": "Hi"})).json()
    assert (chat["object"], completion["object"]) == ("chat.completion", "text_completion")
    events = await gateway.events("/invocations", chat_body())
    assert (events[0]["object"], events[-1]) == ("chat.completion.chunk", "[DONE]")
    for body, param in ((chat_body(top_p=5), "top_p"), ({"messages": [{}]}, "messages[0].role"), ({}, "prompt")):
        response = await gateway.http.post("/invocations", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_health_ready_version_and_metrics_respond(gateway: RunningGateway) -> None:
    assert (await gateway.http.get("/health")).status_code == 200
    assert (await gateway.http.get("/ready")).status_code == 200
    assert "version" in (await gateway.http.get("/version")).json()
    await gateway.chat(max_tokens=3)
    metrics = (await gateway.http.get("/metrics")).text
    assert "proa_gateway_sessions 1.0" in metrics
    assert 'vllm:num_requests_running{engine="127.0.0.1' in metrics
    assert 'proa_gateway_tokens_total{gen_ai_request_model="fake",type="output"} 3.0' in metrics
    assert 'proa_gateway_requests_total{error_type="",route="/v1/chat/completions",status="200"} 1.0' in metrics


async def test_a_tokenizer_folder_replaces_the_engines_tokenizer(tmp_path: Any) -> None:
    async with FakeEngine(script=say(TEXT)) as engine:
        for name, data in engine.files.items():
            (tmp_path / name).write_bytes(data)
        engine.files = {}
        engine.info.tokenizer_digest = ""
        async with running_gateway(engine, tokenizer=tmp_path) as gateway:
            assert (await gateway.chat()).json()["choices"][0]["message"]["content"] == TEXT
