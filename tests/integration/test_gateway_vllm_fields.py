"""vLLM's fields of requests and responses, with OpenAI's client, in front of a fake engine."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proa_gateway.apis.chat.protocol import ChatCompletion, ChatCompletionChunk
from proa_gateway.apis.completions.protocol import Completion, CompletionChoice, CompletionChunk
from support.fake_engine import CHAT_TEMPLATE, EOS, FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, chat_body, running_gateway
from support.tokenizers import byte_level_tokenizer

USER: Any = {"role": "user", "content": "Hi"}
EFFORT = "{{ reasoning_effort is defined }}{% if reasoning_effort is defined %} {{ reasoning_effort }}{% endif %}"


def encode(text: str) -> list[int]:
    return list(byte_level_tokenizer().encode(text).ids)


def sent_text(engine: FakeEngine) -> str:
    return byte_level_tokenizer().decode(prompt_ids(engine.requests[-1]), skip_special_tokens=False)


def template_files(template: str) -> dict[str, bytes]:
    files = FakeEngine().files
    return {**files, "tokenizer_config.json": json.dumps({"chat_template": template}).encode()}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one two three"), max_model_len=100) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


async def test_fields_that_are_not_there_are_null_in_openais_client(gateway: RunningGateway) -> None:
    chat: Any = await gateway.openai.chat.completions.create(model="fake", messages=[USER])
    for name in ("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "system_fingerprint"):
        assert getattr(chat, name) is None
    assert (chat.choices[0].token_ids, chat.choices[0].stop_reason, chat.choices[0].message.reasoning) == (None,) * 3
    completion: Any = await gateway.openai.completions.create(model="fake", prompt="Hi")
    choice = completion.choices[0]
    assert (choice.token_ids, choice.prompt_token_ids, choice.prompt_logprobs, choice.stop_reason) == (None,) * 4


async def test_the_first_chunk_has_the_prompts_token_ids_and_text(gateway: RunningGateway, engine: FakeEngine) -> None:
    extra = {"return_token_ids": True, "return_prompt_text": True}
    stream = await gateway.openai.chat.completions.create(
        model="fake", messages=[USER], stream=True, n=2, extra_body=extra
    )
    chunks: list[Any] = [chunk async for chunk in stream]
    assert chunks[0].prompt_token_ids == prompt_ids(engine.requests[0])
    assert chunks[0].prompt_text == "user: Hi\nassistant: "
    assert not any("prompt_token_ids" in chunk.model_dump() for chunk in chunks[1:])
    first = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == 0]
    assert [token_id for choice in first[1:] for token_id in choice.token_ids] == [*encode("one two three"), EOS]
    whole: Any = await gateway.openai.chat.completions.create(model="fake", messages=[USER], extra_body=extra)
    assert (whole.prompt_token_ids, whole.prompt_text) == (chunks[0].prompt_token_ids, chunks[0].prompt_text)


async def test_each_streamed_completion_begins_with_its_prompts_token_ids(gateway: RunningGateway) -> None:
    body = {"model": "fake", "prompt": ["Hi", [5, 6]], "return_token_ids": True}
    events = await gateway.events("/v1/completions", body)
    for index, prompt in enumerate((encode("Hi"), [5, 6])):
        choices = [event["choices"][0] for event in events[:-1] if event["choices"][0]["index"] == index]
        assert choices[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in choice for choice in choices[1:])


async def test_tokens_are_named_by_their_ids_on_request(gateway: RunningGateway) -> None:
    fields: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 2,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
    }
    choice = (await gateway.chat(**fields)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]) == b"one two three"
    choice = (await gateway.complete(echo=True, **fields | {"logprobs": 1, "top_logprobs": 0})).json()["choices"][0]
    names = [f"token_id:{token_id}" for token_id in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name in top for name, top in zip(names[1:], choice["logprobs"]["top_logprobs"][1:], strict=True))
    assert choice["logprobs"]["text_offset"][1] == len(byte_level_tokenizer().decode(choice["prompt_token_ids"][:1]))


async def test_a_gateway_names_tokens_by_their_ids_unless_a_request_wants_texts(engine: FakeEngine) -> None:
    async with running_gateway(engine, return_tokens_as_token_ids=True) as gateway:
        for asked, expected in ((None, True), (False, False), (True, True)):
            choice = (await gateway.chat(logprobs=True, return_tokens_as_token_ids=asked)).json()["choices"][0]
            assert choice["logprobs"]["content"][0]["token"].startswith("token_id:") is expected


async def test_a_gateway_gives_the_times_of_a_request_beside_its_usage(engine: FakeEngine) -> None:
    async with running_gateway(engine, enable_per_request_metrics=True) as gateway:
        whole: Any = await gateway.openai.completions.create(model="fake", prompt="Hi")
        stream: Any = await gateway.openai.chat.completions.create(
            model="fake", messages=[USER], max_tokens=1, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        two: Any = await gateway.openai.completions.create(model="fake", prompt="Hi", n=2)
    fields = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "tokens_per_second"}
    assert whole.metrics.keys() == {*fields, "mean_itl_ms"}
    assert last.metrics.keys() == fields
    assert two.metrics is None
    assert not any("metrics" in chunk.model_extra for chunk in chunks)


async def test_a_request_may_ask_for_fewer_events_but_not_for_more(engine: FakeEngine) -> None:
    engine.script = say("one two ", repeat=True)
    async with running_gateway(engine, stream_interval=3) as gateway:
        for asked, expected in ((1, 5), (6, 3), (None, 5)):
            body = chat_body(max_tokens=13, stream_interval=asked)
            events = await gateway.events("/v1/chat/completions", body)
            assert len(events[1:-1]) == expected


@pytest.mark.parametrize(("side", "kept"), [(None, [7, 8, 9]), ("left", [7, 8, 9]), ("right", [5, 6, 7])])
async def test_a_prompt_is_truncated_on_the_side_that_is_named(
    gateway: RunningGateway, engine: FakeEngine, side: str | None, kept: list[int]
) -> None:
    fields = {"truncate_prompt_tokens": 3, "truncation_side": side, "echo": True, "max_tokens": 1}
    answer = (await gateway.complete([5, 6, 7, 8, 9], **fields)).json()
    assert prompt_ids(engine.requests[-1]) == kept
    assert answer["choices"][0]["text"].startswith(byte_level_tokenizer().decode(kept))
    assert answer["usage"]["prompt_tokens"] == 3
    assert (await gateway.complete([5, 6], **fields)).status_code == 200
    assert prompt_ids(engine.requests[-1]) == [5, 6]


async def test_minus_one_truncates_a_prompt_to_what_fits(gateway: RunningGateway, engine: FakeEngine) -> None:
    assert (await gateway.complete([7] * 150, truncate_prompt_tokens=-1, max_tokens=20)).status_code == 200
    assert len(prompt_ids(engine.requests[-1])) == 80
    assert (await gateway.chat("x" * 500, truncate_prompt_tokens=-1)).status_code == 200
    assert len(prompt_ids(engine.requests[-1])) == 99
    assert sent_text(engine).endswith("x\nassistant: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_the_final_message_is_continued_and_echoed(
    gateway: RunningGateway, engine: FakeEngine, echo: bool, stream: bool
) -> None:
    last = {"role": "critic", "content": "An apple a day, "}
    body = chat_body(messages=[USER, last], continue_final_message=True, echo=echo)
    if stream:
        events = await gateway.events("/v1/chat/completions", body)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        role, text = deltas[0]["role"], "".join(delta.get("content", "") for delta in deltas)
    else:
        message = (await gateway.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        role, text = message["role"], message["content"]
    assert sent_text(engine) == "user: Hi\ncritic: An apple a day, "
    assert (role, text) == ("critic", "An apple a day, one two three" if echo else "one two three")


async def test_echo_adds_nothing_before_a_message_of_another_role(gateway: RunningGateway) -> None:
    assert (await gateway.chat(echo=True)).json()["choices"][0]["message"]["content"] == "one two three"


async def test_without_a_generation_prompt_the_role_is_that_of_the_last_message(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    answer = (await gateway.chat(add_generation_prompt=False)).json()
    assert answer["choices"][0]["message"]["role"] == "user"
    assert sent_text(engine) == "user: Hi\n"


async def test_a_template_that_strips_messages_has_the_continued_one_stripped_too() -> None:
    template = "{% for message in messages %}<{{ message.content | trim }}>{% endfor %}"
    async with FakeEngine(files=template_files(template)) as engine, running_gateway(engine) as gateway:
        assert (await gateway.chat("An apple ", continue_final_message=True)).status_code == 200
        assert sent_text(engine) == "<An apple"


async def test_a_template_that_leaves_out_the_continued_message_is_an_error() -> None:
    async with FakeEngine(files=template_files("{{ messages[0].role }}")) as engine, running_gateway(engine) as gateway:
        error = (await gateway.chat(continue_final_message=True)).json()["error"]
        assert (error["param"], error["code"]) == ("continue_final_message", "unsupported_parameter")


async def test_documents_and_reasoning_effort_reach_a_template_that_uses_them() -> None:
    template = EFFORT + "{% for document in documents or [] %} {{ document.text }}{% endfor %}"
    async with FakeEngine(files=template_files(template)) as engine, running_gateway(engine) as gateway:
        assert (await gateway.chat(reasoning_effort="high", documents=[{"text": "A"}, {"text": "B"}])).is_success
        assert sent_text(engine) == "True high A B"
        assert (await gateway.chat()).is_success
        assert sent_text(engine) == "False"


async def test_a_template_that_only_switches_thinking_ignores_other_efforts_than_none() -> None:
    template = "{{ 'off' if enable_thinking is defined and not enable_thinking else 'on' }}"
    async with FakeEngine(files=template_files(template)) as engine, running_gateway(engine) as gateway:
        response = await gateway.chat(reasoning_effort="none")
        assert (response.is_success, response.headers.get("x-proa-ignored-fields")) == (True, None)
        assert sent_text(engine) == "off"
        response = await gateway.chat(reasoning_effort="low")
        assert (response.is_success, response.headers["x-proa-ignored-fields"]) == (True, "reasoning_effort")
        assert sent_text(engine) == "on"


async def test_an_effort_becomes_the_nearest_that_the_template_accepts() -> None:
    async with FakeEngine(files=template_files(EFFORT)) as engine, running_gateway(engine) as gateway:
        response = await gateway.chat(reasoning_effort="max")
        assert sent_text(engine) == "True high"
        warning = "reasoning_effort: max became high: the model's chat template accepts low, medium, high"
        assert response.headers["x-proa-warnings"] == warning
        assert "x-proa-warnings" not in (await gateway.chat(reasoning_effort="low")).headers
        card = (await gateway.http.get("/v1/models")).json()["data"][0]
        assert (card["reasoning_efforts"], card["max_model_len"]) == (["low", "medium", "high"], 4096)


async def test_a_requests_chat_template_needs_a_gateway_that_trusts_it(engine: FakeEngine) -> None:
    template = "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}"
    async with running_gateway(engine) as gateway:
        error = (await gateway.chat(chat_template=template)).json()["error"]
        assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
        assert "--trust-request-chat-template" in error["message"]
    async with running_gateway(engine, trust_request_chat_template=True) as gateway:
        assert (await gateway.chat(chat_template=template)).is_success
        assert sent_text(engine) == "[Hi]"
        assert (await gateway.chat(chat_template="{{")).json()["error"]["param"] == "chat_template"
        assert (await gateway.chat(chat_template=CHAT_TEMPLATE)).is_success
        assert sent_text(engine).startswith("user: Hi")


async def test_responses_have_the_fields_of_the_openapi_document(gateway: RunningGateway) -> None:
    everything: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True, "logprobs": 1}
    for fields in ({}, {**everything, "return_prompt_text": True, "top_logprobs": 1}):
        answer = (await gateway.chat(**fields)).json()
        chat = ChatCompletion.model_validate(answer)
        assert answer == chat.model_dump(exclude_unset=True)
        assert set(answer) == set(ChatCompletion.model_fields)
        events = await gateway.events("/v1/chat/completions", chat_body(**fields | {"prompt_logprobs": None}))
        assert events[:-1] == [
            ChatCompletionChunk.model_validate(event).model_dump(exclude_unset=True) for event in events[:-1]
        ]
    for fields in ({}, everything):
        answer = (await gateway.complete(**fields)).json()
        assert answer == Completion.model_validate(answer).model_dump(exclude_unset=True)
        assert set(answer["choices"][0]) == set(CompletionChoice.model_fields)
        body = {"model": "fake", "prompt": "Hi", **fields, "prompt_logprobs": None}
        events = await gateway.events("/v1/completions", body)
        assert events[:-1] == [
            CompletionChunk.model_validate(event).model_dump(exclude_unset=True) for event in events[:-1]
        ]


async def test_the_openapi_document_says_what_routes_send(gateway: RunningGateway) -> None:
    paths = (await gateway.http.get("/openapi.json")).json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = paths[path]["post"]["responses"]["200"]["content"]
        assert content["application/json"]["schema"]["$ref"].startswith("#/components/schemas/")
        assert content["text/event-stream"]["schema"]["type"] == "string"
    assert "content" not in paths["/health"]["get"]["responses"]["200"]
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


async def test_minus_one_log_probabilities_are_those_of_the_whole_vocabulary(engine: FakeEngine) -> None:
    engine.info.max_logprobs = vocabulary = engine.info.vocab_size
    async with running_gateway(engine) as gateway:
        assert (await gateway.chat(logprobs=True, top_logprobs=-1, prompt_logprobs=-1, max_tokens=1)).is_success
        assert (await gateway.complete(logprobs=-1, max_tokens=1)).is_success
    chat, completion = (request.sampling_params for request in engine.requests)
    assert (chat.logprobs, chat.prompt_logprobs, completion.logprobs) == (vocabulary, vocabulary, vocabulary)
