"""The Messages API with Anthropic's official client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from support.fake_engine import FakeEngine, say
from support.gateway import RunningGateway, running_gateway, until

HI: Any = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def serving(
    script: Any, *, key: str = "none", **settings: Any
) -> AsyncIterator[tuple[AsyncAnthropic, RunningGateway, FakeEngine]]:
    async with (
        FakeEngine(script=script) as engine,
        running_gateway(engine, **settings) as gateway,
        gateway.anthropic_client(key) as client,
    ):
        yield client, gateway, engine


async def test_a_message_as_a_whole() -> None:
    async with serving(say("one two")) as (client, _, _):
        message = await client.messages.create(model="fake", max_tokens=50, messages=HI)
        count = await client.messages.count_tokens(model="fake", messages=HI)
    assert message.id.startswith("msg_")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "one two"}]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "fake", "end_turn")
    assert message.usage.input_tokens == count.input_tokens > 0
    assert message.usage.output_tokens > 1


async def test_a_stream_assembles_to_the_same_message() -> None:
    async with serving(say("one two")) as (client, _, _):
        whole = await client.messages.create(model="fake", max_tokens=50, messages=HI)
        async with client.messages.stream(model="fake", max_tokens=50, messages=HI) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
    assert "".join(texts) == "one two"
    assert len(texts) > 1
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


async def test_the_end_is_told_as_anthropic_does() -> None:
    async with serving(say("one two three")) as (client, _, _):
        short = await client.messages.create(model="fake", max_tokens=2, messages=HI)
        stopped = await client.messages.create(model="fake", max_tokens=50, messages=HI, stop_sequences=[" three"])
    assert short.stop_reason == "max_tokens"
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].to_dict()["text"] == "one two"


async def test_errors_have_anthropics_form(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "key": "secret"}]}')
    async with serving(say("one"), key="secret", api_keys=keys, max_body_bytes=10_000) as (client, gateway, _):
        create = client.messages.create
        image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]") as invalid:
            await create(model="fake", max_tokens=5, messages=[{"role": "user", "content": [image]}])
        with pytest.raises(anthropic.NotFoundError):
            await create(model="other", max_tokens=5, messages=HI)
        with pytest.raises(anthropic.RequestTooLargeError):
            await create(model="fake", max_tokens=5, messages=[{"role": "user", "content": "x" * 20_000}])
        unnamed: Any = {"input_schema": {"type": "object"}}
        with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.name"):
            await create(model="fake", max_tokens=5, messages=HI, tools=[unnamed])
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.with_options(api_key="wrong").messages.create(model="fake", max_tokens=5, messages=HI)
        chat_error = (await gateway.http.post("/v1/chat/completions", json={})).json()
        message = await create(model="fake", max_tokens=50, messages=HI)
    body: Any = invalid.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == invalid.value.request_id
    assert isinstance(unknown.value.body, dict)
    assert unknown.value.body["error"]["type"] == "authentication_error"
    assert chat_error["error"]["code"] == "invalid_api_key"  # other routes keep OpenAI's
    assert message._request_id


async def test_fields_without_effect_are_named() -> None:
    async with serving(say("one")) as (client, _, _):
        response = await client.messages.with_raw_response.create(
            model="fake",
            max_tokens=50,
            messages=HI,
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"effort": "high"},
            extra_body={"unheard_of": 1, "cache_control": {"type": "ephemeral"}},
        )
    ignored = response.headers["x-proa-ignored-fields"].split(", ")
    assert sorted(ignored) == ["output_config.effort", "thinking", "unheard_of"]


@pytest.mark.parametrize("keep", ["all", {"type": "all"}, {"type": "thinking_turns", "value": 1}])
async def test_context_management_is_refused_only_if_it_drops_something(keep: Any) -> None:
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
    async with serving(say("one")) as (client, _, _):
        creating = client.beta.messages.create(
            model="fake", max_tokens=9, messages=HI, betas=["context-management-2025-06-27"], context_management=edits
        )
        if "value" not in keep:
            assert (await creating).stop_reason == "end_turn"
            return
        with pytest.raises(anthropic.BadRequestError, match="context_management is not supported"):
            await creating


async def test_a_client_that_leaves_aborts_the_request() -> None:
    async with serving(say("one", repeat=True)) as (client, _, engine):
        async with client.messages.stream(model="fake", max_tokens=2000, messages=HI) as stream:
            async for _ in stream.text_stream:
                break
        await until(lambda: engine.num_unfinished == 0)
