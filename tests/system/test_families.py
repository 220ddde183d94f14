"""Small random models with the tokens and a template of each tool format, behind every endpoint: answers have the shape
of their API, and calls that a grammar forces are read as calls with arguments of their schema."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate
from openai import AsyncOpenAI
from tokenizers import AddedToken

from support.engine_server import serving_model
from support.format_writers import WRITERS, Writer
from support.gateway import RunningGateway, running_gateway
from support.tiny_models import make_tiny_model
from support.tokenizers import byte_level_tokenizer

ARCHITECTURES = {"hermes": "qwen3", "mistral": "mistral", "qwen3_coder": "qwen3_moe"}  # others: llama
VOCAB_SIZE = 480  # more than any of the tokenizers has
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Köln"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Weather", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models by their architecture."""
    names = {"llama", *ARCHITECTURES.values()}
    fields: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024}
    return {name: make_tiny_model(tmp_path_factory.mktemp(name), name, **fields) for name in names}


def chat_template(writer: Writer) -> str:
    """With the signs of the format, and of its reasoning, which the prompt opens only with `enable_thinking`."""
    signs = " ".join(writer.tool_format.signs)
    if writer.tool_format.channels is not None:
        start = "{{ '<|start|>assistant' }}"
    elif writer.reasoning is None:
        start = "{{ 'assistant: ' }}"
    else:
        opening, closing = map(json.dumps, writer.reasoning)
        start = f"{{% if enable_thinking %}}{{{{ {opening} }}}}{{% else %}}{{{{ {opening} + {closing} }}}}{{% endif %}}"
    return (
        f"{{#- {signs} #}}"
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}"
        f"{{% if add_generation_prompt %}}{start}{{% endif %}}"
    )


def write_model(folder: Path, weights: Path, writer: Writer) -> dict[str, int]:
    """The folder of a model; returns the ids of the format's tokens."""
    shutil.copytree(weights, folder, dirs_exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in writer.tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    ids = {token: added[token] for token in writer.tokens}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "chat_template": chat_template(writer),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [0, *(ids[token] for token in ("<|call|>", "<|return|>", "<|eot|>") if token in ids)]
    for name in ("config.json", "generation_config.json"):
        saved = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**saved, "eos_token_id": ends}))
    return ids


class Family:
    def __init__(self, gateway: RunningGateway, writer: Writer, ids: dict[str, int]) -> None:
        channels = writer.tool_format.channels
        self.may_reason_on = channels is not None  # as a random model does, unless it is biased
        bias = {} if channels is None else {str(ids[channels.close[0]]): 100}
        self.fields: dict[str, Any] = {"model": "family", "seed": 1, "logit_bias": bias}
        self.ids = ids
        self.openai: AsyncOpenAI = gateway.openai
        self._gateway = gateway

    async def post(self, path: str, **fields: Any) -> Any:
        response = await self._gateway.http.post(path, json={**self.fields, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, **fields: Any) -> Any:
        """The first choice."""
        body = {"messages": MESSAGES, "max_tokens": 400, **fields}
        return (await self.post("/v1/chat/completions", **body))["choices"][0]


@asynccontextmanager
async def serving(writer: Writer, weights: dict[str, Path], folder: Path) -> AsyncIterator[Family]:
    ids = write_model(folder, weights[ARCHITECTURES.get(writer.tool_format.name, "llama")], writer)
    with serving_model(folder, "family", num_gpu_blocks_override=256) as port:
        async with running_gateway(f"127.0.0.1:{port}") as gateway:
            yield Family(gateway, writer, ids)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.tool_format.name)
async def test_a_random_model_behind_every_endpoint(writer: Writer, weights: dict[str, Path], tmp_path: Path) -> None:
    async with serving(writer, weights, tmp_path) as family:
        await check_plain_chat(family)
        await check_forced_call(family, writer)
        await check_json(family)
        if writer.reasoning is not None and writer.tool_format.channels is None:
            await check_reasoning(family, writer)
        await check_responses(family)
        await check_messages(family)


async def check_plain_chat(family: Family) -> None:
    choice = await family.chat(max_tokens=12, ignore_eos=True)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"


async def check_forced_call(family: Family, writer: Writer) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    choice = await family.chat(**fields)
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    validate(json.loads(call["function"]["arguments"]), SCHEMA)
    text = ""
    stream: Any = await family.openai.chat.completions.create(
        model="family",
        seed=1,
        messages=MESSAGES,
        max_tokens=400,
        logit_bias=family.fields["logit_bias"],
        stream=True,
        **fields,
    )
    async for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or []:
            text += delta.function.arguments or ""
    assert text == call["function"]["arguments"], "streamed and whole"


async def check_json(family: Family) -> None:
    choice = await family.chat(response_format=FORMAT)
    assert choice["finish_reason"] == "stop", choice
    validate(json.loads(choice["message"]["content"]), SCHEMA)


async def check_reasoning(family: Family, writer: Writer) -> None:
    assert writer.reasoning is not None
    signs = [token for token in writer.tokens if any(token in text for text in writer.reasoning)]
    bias = {str(family.ids[token]): -100 for token in signs}  # only the template and the budget write them
    fields: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logit_bias": bias}
    thinking = await family.chat(chat_template_kwargs={"enable_thinking": True}, **fields)
    assert thinking["message"]["reasoning_content"]
    assert not thinking["message"]["content"]
    if {text.strip() for text in writer.reasoning} <= family.ids.keys():
        budget: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5}
        short = await family.chat(**budget, **fields)
        assert short["message"]["reasoning_content"]
        assert short["message"]["content"]
        call: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        called = await family.chat(**budget, **call, logit_bias=bias)
        assert called["message"]["reasoning_content"]
        assert called["finish_reason"] == "tool_calls", called
        answered = await family.chat(**budget, response_format=FORMAT, logit_bias=bias)
        assert answered["message"]["reasoning_content"]
        validate(json.loads(answered["message"]["content"]), SCHEMA)
    answering = await family.chat(chat_template_kwargs={"enable_thinking": False}, **fields)
    assert not answering["message"].get("reasoning_content")
    assert answering["message"]["content"]


async def check_responses(family: Family) -> None:
    tool = {"type": "function", **FUNCTION, "strict": True}
    response = await family.post(
        "/v1/responses",
        input="Weather?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=400,
    )
    assert response["status"] == "completed" or family.may_reason_on, response
    if response["status"] != "completed":
        return
    (call,) = (item for item in response["output"] if item["type"] == "function_call")
    validate(json.loads(call["arguments"]), SCHEMA)


async def check_messages(family: Family) -> None:
    tool = {"name": "weather", "description": "Weather", "input_schema": SCHEMA, "strict": True}
    message = await family.post(
        "/v1/messages",
        messages=MESSAGES,
        tools=[tool],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=400,
    )
    assert message["stop_reason"] == "tool_use" or family.may_reason_on, message
    if message["stop_reason"] != "tool_use":
        return
    (block,) = (block for block in message["content"] if block["type"] == "tool_use")
    validate(block["input"], SCHEMA)
