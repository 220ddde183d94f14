"""Chats with gpt-oss: its template selects the harmony format, and `<|return|>` and `<|call|>` end a message."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from proa_engine.config import EngineConfig
from proa_engine.executor import make_executor
from support.engine_server import running_server
from support.fake_engine import FakeEngine, Reply, prompt_ids
from support.gateway import RunningGateway, running_gateway
from support.mxfp4_models import write_mxfp4
from support.tiny_models import make_tiny_model
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
ENDS = TOKENIZER.encode("<|return|><|call|>").ids
FILES = {
    "generation_config.json": json.dumps({"eos_token_id": ENDS}).encode(),
    "tokenizer.json": TOKENIZER.to_str().encode(),
    "tokenizer_config.json": json.dumps({"eos_token": "<|return|>", "chat_template": TEMPLATE}).encode(),
}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(files=FILES) as engine:
        engine.info.eos_token_ids[:] = ENDS
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


async def test_a_chat_with_random_weights_in_4_bits_ends_at_an_end_token(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "gpt_oss", vocab_size=TOKENIZER.get_vocab_size())
    folder, _ = write_mxfp4(source, tmp_path)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    choices: dict[str, Any] = {"device": "cpu", "block_size": 16, "num_gpu_blocks_override": 100}
    executor = make_executor(EngineConfig.from_options(model=str(folder), **choices), lambda text: None)
    with running_server(executor, tokenizer_folder=folder, step_timeout=60.0, **choices) as server:
        async with running_gateway(f"127.0.0.1:{server.port}") as gateway:
            fields: dict[str, Any] = {
                "model": (await gateway.openai.models.list()).data[0].id,
                "messages": [{"role": "user", "content": "Rome?"}],
                "max_tokens": 20,
            }
            never = {str(token_id): -100 for token_id in ENDS}  # drawn from random weights, one may come
            completion = await gateway.openai.chat.completions.create(**fields, logit_bias=never)
            assert completion.usage.completion_tokens == 20
            # <|call|>, which only generation_config.json names, is certain to come first.
            completion = await gateway.openai.chat.completions.create(**fields, logit_bias={str(ENDS[1]): 100})
            assert (completion.usage.completion_tokens, completion.choices[0].finish_reason) == (1, "stop")
