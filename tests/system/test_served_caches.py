"""Small random models with each kind of cache, served: chats stream, and a conversation's next turn hits its cache."""

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from support.engine_server import serving_model
from support.gateway import running_gateway
from support.tiny_models import CHAT_TEMPLATE, LATENT, make_tiny_model

WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": WINDOWS,
    "qwen3_5_text": {},
    "deepseek_v3": LATENT,
    "gpt_oss": {},
}
QUESTION = "Which of the two hulls is the longer one?"
NUM_TOKENS = 20


def prompt_length(messages: list[dict[str, str]]) -> int:
    """Of messages in ASCII, one token a byte, after the chat template."""
    special = 2 * len(messages) + 1
    assert "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n" in CHAT_TEMPLATE
    texts = [f"{message['role']}\n{message['content']}\n" for message in messages]
    return special + len("".join(texts)) + len("assistant\n")


async def ask(client: AsyncOpenAI, messages: Any) -> tuple[str, Any]:
    """The streamed text and the usage."""
    parts, usage = [], None
    stream: Any = await client.chat.completions.create(
        model="family",
        messages=messages,
        temperature=0,
        max_tokens=NUM_TOKENS,
        logit_bias={str(token): -100 for token in range(128, 259)},  # the answer is ASCII
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert len(parts) > NUM_TOKENS / 2
    return "".join(parts), usage


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_conversation_is_streamed_and_cached(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, family, **({"seed": 3} | FAMILIES[family]))
    with serving_model(folder, "family", kv_cache_memory_bytes=2**22, max_num_seqs=8) as port:
        async with running_gateway(f"127.0.0.1:{port}") as gateway:
            messages = [{"role": "user", "content": QUESTION}]
            answer, usage = await ask(gateway.openai, messages)
            assert usage.prompt_tokens == prompt_length(messages)
            assert usage.completion_tokens == NUM_TOKENS == len(answer)
            assert usage.total_tokens == usage.prompt_tokens + NUM_TOKENS
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And why?"}]
            _, usage = await ask(gateway.openai, messages)
            assert usage.prompt_tokens == prompt_length(messages)
            assert 0 < usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
