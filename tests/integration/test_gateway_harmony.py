"""Chats with gpt-oss: its template selects the harmony format, and `<|return|>` and `<|call|>` end a message."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.fake_engine import FakeEngine, Reply, prompt_ids
from support.gateway import RunningGateway, running_gateway
from support.tokenizers import byte_level_tokenizer

SPECIAL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TEMPLATE = """{%- if tools %}{{ '<|start|>developer<|message|>' ~ (tools | tojson) ~ '<|end|>' }}{% endif %}
{%- for message in messages %}
{{- '<|start|>' + message.role + ('<|channel|>final' if message.role == 'assistant' else '') }}
{{- '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_special_tokens(list(SPECIAL))


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    config = {"eos_token": "<|return|>", "chat_template": TEMPLATE}
    files = {
        "tokenizer.json": TOKENIZER.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    async with FakeEngine(files=files) as engine:
        # As in gpt-oss's generation_config.json.
        engine.info.eos_token_ids[:] = TOKENIZER.encode("<|return|><|call|>").ids
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


async def messages(gateway: RunningGateway, engine: FakeEngine, text: str) -> list[Any]:
    """The model's output `text`, as the choice of a whole and of a streamed completion."""
    engine.script = lambda request: Reply(TOKENIZER.encode(text).ids)
    fields: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Rome?"}],
        "tools": [WEATHER],
    }
    whole = await gateway.openai.chat.completions.create(**fields)
    async with gateway.openai.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    return [whole.choices[0], streamed.choices[0]]


async def test_return_ends_the_final_message(gateway: RunningGateway, engine: FakeEngine) -> None:
    text = ANALYSIS + "<|channel|>final<|message|>It is warm.<|return|>"
    for choice in await messages(gateway, engine, text):
        assert (choice.message.content, choice.finish_reason) == ("It is warm.", "stop")
        assert choice.message.reasoning_content == "Hm."
    assert TOKENIZER.decode(prompt_ids(engine.requests[0]), skip_special_tokens=False).endswith("<|start|>assistant")


async def test_call_ends_a_call(gateway: RunningGateway, engine: FakeEngine) -> None:
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    for choice in await messages(gateway, engine, ANALYSIS + call):
        (made,) = choice.message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("get_weather", {"city": "Rome"})
        assert (choice.message.content or None, choice.finish_reason) == (None, "tool_calls")
