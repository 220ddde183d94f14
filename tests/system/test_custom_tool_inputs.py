"""Inputs of custom tools at temperature 2, through the gateway with the built-in model: Codex's grammar holds.

The model's texts are noise, so only the grammar makes them patches. What ends a line and a patch is made likelier:
otherwise the first line is as long as the context.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from tokenizers import Tokenizer

from proa_engine.builtin import builtin_model_folder
from support.processes import engine_process, gateway_process
from support.text_grammars import PATCH

NUM_CHATS = 200
SECONDS = 600  # far more than all answers take, on a busy machine
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH.grammar.definition}}
FIELDS: Any = {
    "model": "proa-builtin",
    "messages": [{"role": "user", "content": "Write hello to a file."}],
    "tools": [{"type": "custom", "custom": {"name": "apply_patch", "format": GRAMMAR}}],
    "tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}},
    "temperature": 2,
    "max_tokens": 400,
}
BIAS = {"\\": 20, "n": 12, "*": 14, "ĠE": 6}  # logits


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    engine = engine_process("--model=builtin", env={"OMP_NUM_THREADS": "1"})
    with engine as (_, address), gateway_process(address) as (_, port):
        yield port


@pytest.fixture
async def client(port: int) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://127.0.0.1:{port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as made:
        yield made


async def test_200_sampled_patches_match_their_grammar(client: AsyncOpenAI) -> None:
    tokenizer = Tokenizer.from_file(str(builtin_model_folder() / "tokenizer.json"))
    bias: Any = {str(tokenizer.token_to_id(token)): bias for token, bias in BIAS.items()}
    completions = await asyncio.gather(
        *(client.chat.completions.create(**FIELDS, logit_bias=bias, seed=seed) for seed in range(NUM_CHATS))
    )
    inputs = [text for completion in completions for text in whole_inputs(completion)]
    assert [text for text in inputs if not PATCH.is_input(text)] == []
    assert len(inputs) > NUM_CHATS / 2


def whole_inputs(completion: ChatCompletion) -> Iterator[str]:
    """The input of its call, if it was not cut."""
    (choice,) = completion.choices
    for call in choice.message.tool_calls or ():
        assert call.type == "custom"
        if choice.finish_reason != "length":
            yield call.custom.input
