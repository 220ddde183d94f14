"""Responses in the background."""

from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from support.fake_engine import FakeEngine, say
from support.gateway import running_gateway, until


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(script=say("one")) as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[AsyncOpenAI]:
    async with running_gateway(engine) as gateway:
        yield gateway.openai


async def fetched(client: AsyncOpenAI, id: str, *statuses: str) -> Response:
    """The response once it has one of these statuses."""
    while (response := await client.responses.retrieve(id)).status not in statuses:
        pass
    return response


async def test_a_response_is_fetched_later_and_continued(engine: FakeEngine, client: AsyncOpenAI) -> None:
    engine.step_delay = None
    queued = await client.responses.create(model="fake", input="Hi", background=True)
    started = await fetched(client, queued.id, "in_progress")
    with pytest.raises(openai.BadRequestError, match="cannot be continued"):
        await client.responses.create(model="fake", input="More", previous_response_id=queued.id)
    engine.step_delay = 0.0
    ended = await fetched(client, queued.id, "completed")
    later = await client.responses.create(model="fake", input="More", previous_response_id=queued.id)
    assert (queued.status, queued.output, queued.background) == ("queued", [], True)
    assert Response.model_validate(queued.model_dump(), strict=True)
    assert started.model == "fake"
    assert (ended.id, ended.output_text) == (queued.id, "one")
    assert later.status == "completed"


async def test_cancelling_aborts_the_request(engine: FakeEngine, client: AsyncOpenAI) -> None:
    engine.script = say("one", repeat=True)
    engine.step_delay = 0.01
    queued = await client.responses.create(model="fake", input="Hi", background=True)
    await fetched(client, queued.id, "in_progress")
    await until(lambda: engine.requests)
    cancelled = await client.responses.cancel(queued.id)
    await until(lambda: engine.num_unfinished == 0)
    assert cancelled.status == (await client.responses.cancel(queued.id)).status == "cancelled"


async def test_deleting_aborts_the_request(engine: FakeEngine, client: AsyncOpenAI) -> None:
    engine.script = say("one", repeat=True)
    engine.step_delay = 0.01
    queued = await client.responses.create(model="fake", input="Hi", background=True)
    await until(lambda: engine.requests)
    await client.responses.delete(queued.id)
    await until(lambda: engine.num_unfinished == 0)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(queued.id)


async def test_an_error_is_in_the_response(client: AsyncOpenAI) -> None:
    queued = await client.responses.create(model="other", input="Hi", background=True)
    failed = await fetched(client, queued.id, "failed")
    assert failed.error is not None
    assert "other" in failed.error.message


async def test_other_responses_cannot_be_cancelled(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="fake", input="Hi")
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await client.responses.cancel(response.id)


async def test_a_gateway_that_ends_does_not_wait_for_the_background(engine: FakeEngine) -> None:
    engine.script = say("one", repeat=True)
    engine.step_delay = 0.01
    async with running_gateway(engine) as gateway:
        await gateway.openai.responses.create(model="fake", input="Hi", background=True)
        await until(lambda: engine.requests)
    await until(lambda: engine.num_unfinished == 0)
