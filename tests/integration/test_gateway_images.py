"""Images in chats: from the body of a request to what an engine gets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from proa.blocks import hash_blocks, root_hash
from proa.contract import Image
from proa.engine.v1 import service_pb2
from proa_gateway.images.config import ImageOptions
from support.chat_images import (
    END,
    PAD,
    PLACEHOLDER,
    START,
    TEXT_TEMPLATE,
    data_url,
    image_engine,
    image_part,
    prompt_of,
    user,
)
from support.fake_engine import FakeEngine, prompt_ids, say
from support.gateway import RunningGateway, running_gateway, until

ONE = [user(image_part(1), "What?")]


def sent_pixels(engine: FakeEngine) -> list[list[int]]:
    """Bytes of pixels of each image of each request."""
    return [[len(image.pixels) for image in request.images] for request in engine.requests]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with image_engine(script=say("A cat.")) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine, routing="prefix") as gateway:
        yield gateway


async def create(client: AsyncOpenAI, messages: Any, **fields: Any) -> Any:
    return await client.chat.completions.create(model="fake", messages=messages, **fields)


async def test_images_stand_in_the_prompt_where_the_template_shows_them(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    response = await create(gateway.openai, [user("One: ", image_part(1), " two: ", image_part(2, 64, 64))])
    models = (await gateway.http.get("/v1/models")).json()["data"]
    assert models[0]["input_modalities"] == ["text", "image"]
    first, second = engine.requests[0].images
    assert prompt_of(engine) == f"user: One: {START}{PAD * 2}{END} two: {START}{PAD * 4}{END}\nassistant: "
    assert (first.num_tokens, first.height, first.width) == (2, 32, 64)
    assert (second.num_tokens, len(second.pixels)) == (4, 64 * 64 * 3)
    assert response.usage.prompt_tokens == len(prompt_ids(engine.requests[0]))
    assert response.usage.prompt_tokens_details.image_tokens == 6
    assert response.usage.prompt_tokens_details.model_extra == {"multimodal_tokens": {"image": 6}}


async def test_a_stream_has_the_same_answer_and_usage(gateway: RunningGateway) -> None:
    stream = await create(gateway.openai, ONE, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "A cat."
    assert chunks[-1].usage.prompt_tokens_details.image_tokens == 2


async def test_pixels_are_sent_once_in_a_session(engine: FakeEngine, gateway: RunningGateway) -> None:
    await create(gateway.openai, ONE, n=2)
    await create(gateway.openai, [user(image_part(1), image_part(2), image_part(2))])
    size = 32 * 64 * 3
    assert sent_pixels(engine) == [[size], [0], [0, size, 0]]


async def test_pixels_that_an_engine_has_dropped_are_sent_again(engine: FakeEngine, gateway: RunningGateway) -> None:
    await create(gateway.openai, [user(image_part(1), image_part(2))])
    engine.pixels.popitem()
    response = await create(gateway.openai, [user(image_part(1), image_part(2), "Again?")])
    await create(gateway.openai, ONE)
    size = 32 * 64 * 3
    assert response.choices[0].message.content == "A cat."
    assert sent_pixels(engine) == [[size, size], [0, 0], [size, size], [0]]
    assert engine.requests[1].request_id == engine.requests[2].request_id


async def test_an_engine_that_keeps_no_images_is_sent_the_pixels_each_time(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    for _ in range(4):  # a failed attempt each would exhaust the attempts and open the circuit breaker
        await create(gateway.openai, ONE)
        engine.pixels.clear()
    assert [sum(sizes) > 0 for sizes in sent_pixels(engine)] == [True, False, True, False, True, False, True]


async def test_an_engine_that_misses_images_again_fails_the_request(
    engine: FakeEngine, gateway: RunningGateway
) -> None:
    engine.rejection = service_pb2.Rejected(code=9, message="no room", missing_images=b"x" * 16)
    with pytest.raises(openai.InternalServerError, match="no room"):
        await create(gateway.openai, ONE)
    assert len(engine.requests) == 2


async def test_another_engine_gets_the_pixels_and_the_tokens_of_a_lost_one(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with image_engine(script=say("A cat.")) as other, running_gateway(engine, other) as gateway:
        other.sleep_level = 1  # gets no request
        await until(lambda: sum(each.usable for each in gateway.gateway.pool.engines) == 1)
        creating = asyncio.create_task(create(gateway.openai, ONE, stream=True))
        await engine.until(lambda engine: bool(engine.requests))
        await engine.step()
        stream = await creating
        other.sleep_level = 0
        await until(lambda: sum(each.usable for each in gateway.gateway.pool.engines) == 2)
        await engine.stop()
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "A cat."
    assert other.requests[0].resumed_token_ids
    assert sent_pixels(other) == sent_pixels(engine) == [[32 * 64 * 3]]


async def test_hashes_of_blocks_have_the_images(
    engine: FakeEngine, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, made = gateway.gateway.router, []
    make_hints = router.make_hints

    async def spy(*args: Any, **kwargs: Any) -> Any:
        made.append(await make_hints(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(router, "make_hints", spy)
    await create(gateway.openai, [user("Some words before the image: ", image_part(1), " and some words after it.")])
    (sent,) = engine.requests[0].images
    image = Image(hash=sent.hash, offset=sent.offset, num_tokens=2, height=32, width=64)
    root = root_hash(engine.info.model, engine.info.revision)
    assert made[0].block_hashes == hash_blocks(root, prompt_ids(engine.requests[0]), 16, (), [image])
    assert made[0].block_hashes


async def test_a_template_that_reads_text_gets_placeholders_before_the_text() -> None:
    async with image_engine(template=TEXT_TEMPLATE) as engine, running_gateway(engine) as gateway:
        await create(gateway.openai, [user("What?", image_part(1), image_part(2, 32, 32))], max_tokens=1)
    assert prompt_of(engine) == f"user: {START}{PAD * 2}{END}\n{START}{PAD}{END}\nWhat?\n"


async def test_each_conversation_of_a_batch_has_its_images(engine: FakeEngine, gateway: RunningGateway) -> None:
    body = {"model": "fake", "messages": [ONE, [user(image_part(2), image_part(3))], [user("None")]]}
    response = await gateway.http.post("/v1/chat/completions/batch", json=body)
    assert response.status_code == 200, response.text
    assert [len(request.images) for request in engine.requests] == [1, 2, 0]
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 6
    body["messages"] = [ONE, [user({"type": "image_url", "image_url": "data:,"})]]
    response = await gateway.http.post("/v1/chat/completions/batch", json=body)
    assert response.json()["error"]["param"] == "messages[1][0].content[0]"


async def test_tokens_of_images_are_counted(engine: FakeEngine, gateway: RunningGateway) -> None:
    await create(gateway.openai, ONE)
    response = await gateway.http.post("/tokenize", json={"model": "fake", "messages": ONE})
    assert response.json()["tokens"] == prompt_ids(engine.requests[0])


async def test_results_of_tools_show_images(engine: FakeEngine, gateway: RunningGateway) -> None:
    tool = {"role": "tool", "tool_call_id": "a", "content": [image_part(1)]}
    await create(gateway.openai, [user("Look."), tool])
    # The template writes no calls, so results are texts of the user.
    assert prompt_of(engine) == f"user: Look.\nuser: [result of a tool]\n{START}{PAD * 2}{END}\nassistant: "


async def test_a_prompt_is_truncated_beside_its_images(engine: FakeEngine, gateway: RunningGateway) -> None:
    await create(gateway.openai, [user("many words before ", image_part(1))], extra_body={"truncate_prompt_tokens": 12})
    (image,) = engine.requests[0].images
    ids = prompt_ids(engine.requests[0])
    assert len(ids) == 12
    assert ids[image.offset : image.offset + 2] == [engine.info.images.token_id] * 2


BROKEN = "data:image/png;base64,AAAA"
REFUSED: list[tuple[list[dict[str, Any]], dict[str, Any], str, str]] = [
    ([user("x", {"type": "image_url", "image_url": BROKEN})], {}, "messages[0].content[1]", "image"),
    ([user("x"), user({"type": "image_url", "image_url": "https://a.test/b.png"})], {}, "messages[1].content[0]", ""),
    ([user({"type": "image_url", "image_url": "file:///etc/passwd"})], {}, "messages[0].content[0]", ""),
    ([user({"type": "image_url", "image_url": "data:image/png;base64,%%%"})], {}, "messages[0].content[0]", ""),
    ([user(f"{PLACEHOLDER}", image_part(1))], {}, "messages", "2 times"),
    ([user(f"{PAD}", image_part(1))], {}, "messages", PAD),
    ([{**user(image_part(1)), "role": "system"}], {}, "messages", "0 times"),
    ([user(*[image_part(1)] * 17)], {}, "messages[0].content[16]", "At most 16"),
    (ONE, {"truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "cut off an image"),
    (ONE, {"truncate_prompt_tokens": 3, "truncation_side": "right"}, "truncate_prompt_tokens", "cut off an image"),
    ([user("x" * 4096, image_part(1))], {}, "messages", "maximum context length"),
]


async def test_images_that_cannot_be_read_are_refused_by_name(engine: FakeEngine, gateway: RunningGateway) -> None:
    for messages, fields, param, words in REFUSED:
        body = {"model": "fake", "messages": messages, **fields}
        response = await gateway.http.post("/v1/chat/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert words in error["message"]
        assert len(error["message"]) < 300  # the URL is not in it
    assert not engine.requests


async def test_a_model_without_images_refuses_them_everywhere() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": ONE},
        "/tokenize": {"messages": ONE},
        "/v1/messages": {
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": data_url()}}]}
            ],
        },
        "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data_url()}]}]},
    }
    async with FakeEngine() as engine, running_gateway(engine) as gateway:
        for path, body in bodies.items():
            response = await gateway.http.post(path, json={"model": "fake", **body})
            assert response.status_code == 400
            assert "does not read images" in response.json()["error"]["message"]
    assert not engine.requests


async def test_images_of_unfinished_requests_are_bounded(engine: FakeEngine) -> None:
    engine.step_delay = None
    async with running_gateway(engine, images=ImageOptions(max_image_memory=3 * 32 * 64 * 3)) as gateway:
        running = asyncio.create_task(create(gateway.openai, [user(image_part(1), image_part(2))]))
        await engine.until(lambda engine: bool(engine.requests))
        with pytest.raises(openai.RateLimitError, match="bytes of unfinished requests' images"):
            await create(gateway.openai, [user(image_part(1), image_part(3))])
        engine.step_delay = 0.0
        await running
        await create(gateway.openai, [user(*[image_part(number) for number in range(4)])])
