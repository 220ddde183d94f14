"""The Responses API with OpenAI's official client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from proa_gateway.apis.responses.store import MAX_PARTS
from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, running_gateway, until
from support.tokenizers import byte_level_tokenizer

EVENTS: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
LOGPROBS: Any = ["message.output_text.logprobs"]


@asynccontextmanager
async def serving(script: Any, **settings: Any) -> AsyncIterator[tuple[AsyncOpenAI, RunningGateway, FakeEngine]]:
    async with FakeEngine(script=script) as engine, running_gateway(engine, **settings) as gateway:
        yield gateway.openai, gateway, engine


def prompt_text(engine: FakeEngine) -> str:
    """The text of the last request's prompt."""
    return str(byte_level_tokenizer().decode(prompt_ids(engine.requests[-1])))


def comparable(response: Response) -> dict[str, Any]:
    """The response without what differs between two requests."""
    fields = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in fields["output"]:
        item.pop("id")
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return fields


async def test_a_response_as_a_whole() -> None:
    async with serving(say("one two")) as (client, gateway, _):
        response = await client.responses.create(model="fake", input="Hi", metadata={"a": "b"}, user="me")
        raw = (await gateway.http.post("/v1/responses", json={"model": "fake", "input": "Hi"})).json()
    Response.model_validate(raw, strict=True)
    assert response.id.startswith("resp_")
    assert (response.status, response.output_text, response.model) == ("completed", "one two", "fake")
    assert (response.metadata, response.user, response.error) == ({"a": "b"}, "me", None)
    assert response.usage is not None
    assert response.usage.output_tokens > 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


async def test_input_tokens_are_those_of_the_same_response() -> None:
    fields: Any = {"model": "fake", "input": "Hi", "instructions": "Be short."}
    async with serving(say("one two")) as (client, _, engine):
        first = await client.responses.create(**fields)
        assert first.usage is not None
        assert (await client.responses.input_tokens.count(**fields)).input_tokens == first.usage.input_tokens
        second = await client.responses.create(**fields, previous_response_id=first.id)
        assert second.usage is not None
        count = await client.responses.input_tokens.count(**fields, previous_response_id=first.id)
        assert count.input_tokens == second.usage.input_tokens > first.usage.input_tokens
        assert len(engine.requests) == 2
        with pytest.raises(openai.BadRequestError, match="truncation"):
            await client.responses.input_tokens.count(**fields, truncation="auto")


async def test_a_stream_assembles_to_the_same_response() -> None:
    async with serving(say("one two")) as (client, _, _):
        whole = await client.responses.create(model="fake", input="Hi")
        async with client.responses.stream(model="fake", input="Hi") as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    assert comparable(streamed) == comparable(whole)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "one two"
    assert len(deltas) > 1
    others = [event.type for event in events if event.type != "response.output_text.delta"]
    assert others == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_events_have_the_clients_types() -> None:
    async with serving(say("one two")) as (client, _, _):
        events = [event async for event in await client.responses.create(model="fake", input="Hi", stream=True)]
    for event in events:
        EVENTS.validate_python(event.model_dump(), strict=True)


async def test_a_limit_makes_the_response_incomplete() -> None:
    async with serving(say("one two three")) as (client, _, _):
        whole = await client.responses.create(model="fake", input="Hi", max_output_tokens=2)
        stream = await client.responses.create(model="fake", input="Hi", max_output_tokens=2, stream=True)
        last = [event async for event in stream][-1]
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[0].to_dict()["status"] == "incomplete"
    assert last.type == "response.incomplete"
    assert comparable(last.response) == comparable(whole)


async def test_log_probabilities_are_those_of_the_text() -> None:
    async with serving(say("one two")) as (client, _, _):
        arguments: Any = {"model": "fake", "input": "Hi", "include": LOGPROBS, "top_logprobs": 2}
        whole = await client.responses.create(**arguments)
        async with client.responses.stream(**arguments) as stream:
            deltas = [event async for event in stream if event.type == "response.output_text.delta"]
            streamed = await stream.get_final_response()
    assert comparable(streamed) == comparable(whole)
    message = whole.output[0]
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs is not None
    assert "".join(entry.token for entry in logprobs).startswith("one two")
    assert len(logprobs[0].top_logprobs) == 2
    assert sum(len(delta.logprobs) for delta in deltas) >= len(deltas)


async def test_items_and_instructions_are_the_prompt() -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two"}]},
        {"role": "user", "content": "Three"},
    ]
    async with serving(say("four")) as (client, _, engine):
        await client.responses.create(model="fake", input=items, instructions="Count.")
        text = prompt_text(engine)
        unfinished: Any = {"type": "message", "role": "assistant", "content": "Fo", "status": "in_progress"}
        await client.responses.create(model="fake", input=[*items, unfinished])
        continued = prompt_text(engine)
    assert text == "system: Count.\nsystem: Be brief.\nuser: One\nassistant: Two\nuser: Three\nassistant: "
    assert continued.endswith("assistant: Fo")


async def test_a_response_is_continued() -> None:
    async with serving(say("one")) as (client, _, engine):
        first = await client.responses.create(model="fake", input="A", instructions="Count.")
        second = await client.responses.create(model="fake", input="B", previous_response_id=first.id)
        await client.responses.create(model="fake", input="C", previous_response_id=second.id)
        text = prompt_text(engine)
        again = await client.responses.retrieve(second.id)
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
    assert text == "user: A\nassistant: one\nuser: B\nassistant: one\nuser: C\nassistant: "
    assert again.to_dict() == second.to_dict()
    assert [item.to_dict()["role"] for item in items] == ["user", "assistant", "user"]
    assert items[1].id == first.output[0].id


async def test_a_response_that_is_not_stored_is_not_found(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "key": "a"}, {"name": "b", "key": "b"}]}')
    async with serving(say("one"), api_keys=keys, max_stored_responses=1) as (client, _, _):
        a, b = client.with_options(api_key="a"), client.with_options(api_key="b")
        unstored = await a.responses.create(model="fake", input="A", store=False)
        old = await a.responses.create(model="fake", input="A")
        new = await a.responses.create(model="fake", input="A")
        assert (await a.responses.retrieve(new.id)).id == new.id
        for response in (unstored, old):
            with pytest.raises(openai.BadRequestError, match=r"Response with id .* not found: ") as error:
                await a.responses.create(model="fake", input="B", previous_response_id=response.id)
            assert (error.value.param, error.value.code) == ("previous_response_id", "previous_response_not_found")
            with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found: "):
                await a.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await b.responses.retrieve(new.id)
    assert unstored.to_dict()["store"] is False


async def test_keys_of_flags_do_not_see_each_others_responses() -> None:
    async with serving(say("one"), api_key=("a", "b"), max_stored_responses=2) as (client, _, _):
        a, b = client.with_options(api_key="a"), client.with_options(api_key="b")
        first = await a.responses.create(model="fake", input="A")
        for forbidden in (b.responses.retrieve, b.responses.delete, b.responses.cancel, b.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await forbidden(first.id)
        with pytest.raises(openai.BadRequestError):
            await b.responses.create(model="fake", input="B", previous_response_id=first.id)
        for _ in range(3):
            await b.responses.create(model="fake", input="B")
        assert (await a.responses.retrieve(first.id)).id == first.id


async def test_encrypted_content_is_not_stored() -> None:
    reasoning: Any = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 1_000_000}
    async with serving(say("one")) as (client, gateway, _):
        first = await client.responses.create(model="fake", input=[reasoning, {"role": "user", "content": "A"}])
        items = (await client.responses.input_items.list(first.id)).data
        stored = gateway.gateway.responses.get("", first.id)
    assert [item.type for item in items] == ["message", "reasoning"]
    assert stored is not None
    assert stored.num_bytes < 5000


async def test_input_that_is_too_large_is_not_stored() -> None:
    content: Any = [{"type": "input_text", "text": ""}] * MAX_PARTS
    body: Any = {"model": "fake", "input": [{"role": "user", "content": content}]}
    async with serving(say("one"), max_stored_responses=10) as (client, _, _):
        response = await client.responses.create(**body)
        assert response.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError, match="too large to be stored"):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError, match="too large to be stored") as error:
            await client.responses.create(**body, background=True)
    assert error.value.param == "input"


async def test_structured_output_is_parsed() -> None:
    class City(BaseModel):
        name: str

    async with serving(say('{"name": "Rome"}')) as (client, _, engine):
        parsed = await client.responses.parse(model="fake", input="A city", text_format=City)
        async with client.responses.stream(model="fake", input="A city", text_format=City) as stream:
            streamed = (await stream.get_final_response()).output_parsed
        with pytest.raises(openai.BadRequestError, match=r"text\.format and structured_outputs"):
            await client.responses.create(
                model="fake",
                input="A city",
                text={"format": {"type": "json_object"}},
                extra_body={"structured_outputs": {"regex": "a"}},
            )
    assert parsed.output_parsed == streamed == City(name="Rome")
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"
    assert engine.requests[-1].sampling_params.HasField("grammar")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": []}, "input"),
        ({"tools": [{"name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"input": "~" * 5000}, "input"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with serving(say("one")) as (_, gateway, _):
        answer = await gateway.http.post("/v1/responses", json={"model": "fake", "input": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param


async def test_fields_without_effect_are_named() -> None:
    fields: Any = {"unheard_of": 1, "top_k": 1, "truncation": "disabled", "prompt_cache_retention": "24h"}
    fields |= {"text": {"verbosity": "low"}, "reasoning": {"effort": "high", "context": "all_turns"}}
    async with serving(say("one")) as (client, _, engine):
        answer = await client.responses.with_raw_response.create(
            model="fake", input="Hi", top_logprobs=3, max_tool_calls=3, extra_body=fields
        )
    ignored = sorted(answer.headers["x-proa-ignored-fields"].split(", "))
    assert ignored == ["reasoning.context", "reasoning.effort", "text.verbosity", "top_logprobs", "unheard_of"]
    assert engine.requests[-1].sampling_params.top_k == 1


async def test_a_stream_that_fails_ends_with_the_failed_response() -> None:
    async with serving(say("one", repeat=True)) as (client, _, engine):
        engine.step_delay = 0.01
        stream = await client.responses.create(model="fake", input="Hi", max_output_tokens=1000, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta" and len(events) == 6:
                await engine.stop()
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"
    assert failed.output[0].to_dict()["status"] == "incomplete"
    assert EVENTS.validate_python(events[-1].model_dump(), strict=True)


async def test_a_stream_goes_on_when_its_engine_is_lost() -> None:
    async with (
        FakeEngine(script=say("one", repeat=True), step_delay=0.01) as first,
        FakeEngine(script=say("one", repeat=True), step_delay=0.01) as second,
        running_gateway(first, second) as gateway,
        gateway.openai.responses.stream(model="fake", input="Hi", max_output_tokens=60) as stream,
    ):
        events = []
        async for event in stream:
            events.append(event)
            if len(events) == 10:
                await (first if first.num_unfinished else second).stop()
    assert events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage is not None
    assert events[-1].response.usage.output_tokens == 60
    assert first.requests
    assert second.requests
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == ("one" * 60)[: len("".join(deltas))]


async def test_a_client_that_leaves_aborts_the_request() -> None:
    async with serving(say("one", repeat=True)) as (client, _, engine):
        async with client.responses.stream(model="fake", input="Hi") as stream:
            async for _ in stream:
                break
        await until(lambda: engine.num_unfinished == 0)
