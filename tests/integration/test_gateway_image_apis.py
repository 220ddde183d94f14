"""Images in the Messages and the Responses API, with the official clients."""

from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic

from proa.engine.v1 import core_pb2
from support.chat_images import data_url, image_engine, image_part, png, user
from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, running_gateway


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with image_engine(script=say("A cat.")) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


@pytest.fixture
async def claude(gateway: RunningGateway) -> AsyncIterator[AsyncAnthropic]:
    async with gateway.anthropic_client() as client:
        yield client


def block(seed: int = 1) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(png(seed)).decode()}
    return {"type": "image", "source": source}


async def chat_ids(engine: FakeEngine, gateway: RunningGateway, *messages: dict[str, Any]) -> list[int]:
    """The prompt of a chat with these messages."""
    await gateway.openai.chat.completions.create(model="fake", messages=list(messages))  # type: ignore[arg-type]
    return prompt_ids(engine.requests.pop())


async def test_messages_show_images_as_chats_do(
    engine: FakeEngine, gateway: RunningGateway, claude: AsyncAnthropic
) -> None:
    expected = await chat_ids(engine, gateway, user("Look: ", image_part(1), " What?"))
    text: list[Any] = [{"type": "text", "text": "Look: "}, block(), {"type": "text", "text": " What?"}]
    messages: Any = [{"role": "user", "content": text}]
    message = await claude.messages.create(model="fake", max_tokens=50, messages=messages)
    async with claude.messages.stream(model="fake", max_tokens=50, messages=messages) as stream:
        streamed = await stream.get_final_message()
    counted = await claude.messages.count_tokens(model="fake", messages=messages)
    assert [prompt_ids(request) for request in engine.requests] == [expected, expected]
    assert message.content[0].to_dict()["text"] == streamed.content[0].to_dict()["text"] == "A cat."
    assert message.usage.input_tokens == counted.input_tokens == len(expected)


async def test_images_of_results_are_shown_after_them(
    engine: FakeEngine, gateway: RunningGateway, claude: AsyncAnthropic
) -> None:
    expected = await chat_ids(
        engine, gateway, {"role": "tool", "tool_call_id": "a", "content": "Seen."}, user(image_part(1)), user("What?")
    )
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Seen."}, block()]}
    messages: Any = [{"role": "user", "content": [result, {"type": "text", "text": "What?"}]}]
    await claude.messages.create(model="fake", max_tokens=50, messages=messages)
    assert prompt_ids(engine.requests[0]) == expected


UNREADABLE: list[Any] = [
    {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    {"type": "base64", "media_type": "text/html", "data": "AAAA"},
    {"type": "base64", "media_type": "image/png", "data": ""},
    {"type": "url", "url": "http://127.0.0.1/a.png"},
    {"type": "url", "url": "\\\\host\\share"},
    {"type": "file", "file_id": "file_1"},
]


async def test_images_that_cannot_be_read_are_anthropics_errors(claude: AsyncAnthropic) -> None:
    for source in UNREADABLE:
        messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        for call in (
            claude.messages.create(model="fake", max_tokens=5, messages=messages),
            claude.messages.count_tokens(model="fake", messages=messages),
        ):
            with pytest.raises(anthropic.BadRequestError) as raised:
                await call
            body: Any = raised.value.body
            assert body["error"]["type"] == "invalid_request_error"


def input_image(seed: int = 1) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(seed), "detail": "auto"}


async def test_a_response_is_continued_with_its_images(engine: FakeEngine, gateway: RunningGateway) -> None:
    expected = await chat_ids(
        engine,
        gateway,
        user("Look: ", image_part(1)),
        {"role": "assistant", "content": "A cat."},
        user(image_part(2), "And this?"),
    )
    client, text = gateway.openai.responses, {"type": "input_text", "text": "Look: "}
    first = await client.create(model="fake", input=[{"role": "user", "content": [text, input_image()]}])  # type: ignore
    more = [input_image(2), {"type": "input_text", "text": "And this?"}]
    async with client.stream(
        model="fake",
        input=[{"role": "user", "content": more}],  # type: ignore
        previous_response_id=first.id,
    ) as stream:
        second = await stream.get_final_response()
    items = (await client.input_items.list(second.id, order="asc")).data
    assert first.output_text == second.output_text == "A cat."
    assert prompt_ids(engine.requests[-1]) == expected
    assert items[0].to_dict()["content"] == [text, input_image()]
    assert second.usage is not None
    assert second.usage.input_tokens == len(expected)


async def test_a_response_in_the_background_reads_images(engine: FakeEngine, gateway: RunningGateway) -> None:
    content: Any = [{"role": "user", "content": [input_image()]}]
    queued = await gateway.openai.responses.create(model="fake", input=content, background=True)
    while (ended := await gateway.openai.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
        pass
    assert (ended.status, len(engine.requests[0].images)) == ("completed", 1)


async def test_results_of_calls_have_images(engine: FakeEngine, gateway: RunningGateway) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output: Any = [user("Hi"), call, {"type": "function_call_output", "call_id": "a", "output": [input_image()]}]
    output[0]["content"] = "Hi"
    await gateway.openai.responses.create(model="fake", input=output)
    assert len(engine.requests[0].images) == 1


async def test_errors_about_images_name_their_place_in_the_input(gateway: RunningGateway) -> None:
    broken = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    with pytest.raises(openai.BadRequestError) as raised:
        await gateway.openai.responses.create(model="fake", input=[{"role": "user", "content": [broken]}])  # type: ignore
    assert raised.value.param == "input[0].content[0].image_url"


async def test_embeddings_refuse_images_by_name() -> None:
    tasks = (core_pb2.POOLING_TASK_EMBED,)
    async with image_engine(pooling_tasks=tasks) as engine, running_gateway(engine) as gateway:
        body = {"model": "fake", "messages": [user(image_part(1))]}
        response = await gateway.http.post("/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content[0]")
