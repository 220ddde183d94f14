"""64 clients at once with every API and constraint, adapters, embeddings and images; engines are killed meanwhile. Each
answer is valid, and equal to the same request alone."""

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from support.image_files import data_url, random_areas
from support.image_models import make_image_model
from support.processes import engine_process, gateway_process, wait_for_models

CLIENTS = 64
MODEL = "proa-builtin"
ADAPTERS = ("sailor", "butler")
IMAGE_MODEL = "images"
QUESTIONS = ("What is {} plus {}?", "Tell me a story about {} boats and {} cats.", "Who are you, and what is {} + {}?")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "save_person", "description": "Save a person", "parameters": PERSON}
PLATE = r"[A-Z]{2}-[0-9]{4}"


@dataclass(frozen=True)
class Clients:
    """The official clients of one gateway."""

    openai: AsyncOpenAI
    anthropic: AsyncAnthropic


@asynccontextmanager
async def open_clients(url: str) -> AsyncIterator[Clients]:
    async with (
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as openai,
        AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=240) as anthropic,
    ):
        yield Clients(openai, anthropic)


def question(index: int) -> str:
    return QUESTIONS[index % len(QUESTIONS)].format(index, index // 3)


def chat(index: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question(index)}]
    return {"model": MODEL, "messages": messages, "seed": index, "max_tokens": 60, **fields}


async def plain(clients: Clients, index: int) -> str:
    """A sampled chat, streamed."""
    stream = await clients.openai.chat.completions.create(**chat(index, stream=True, temperature=0.8))
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def schema(clients: Clients, index: int) -> str:
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = await clients.openai.chat.completions.create(
        **chat(index, response_format=response_format, max_tokens=200)
    )
    content: str = answer.choices[0].message.content
    jsonschema.validate(json.loads(content), PERSON)
    return content


async def tool(clients: Clients, index: int) -> str:
    """A call that must be made, streamed."""
    tools = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    fields = chat(index, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    async with clients.openai.chat.completions.stream(**fields) as stream:
        final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), PERSON)
    return call.function.arguments


async def regex(clients: Clients, index: int) -> str:
    answer = await clients.openai.completions.create(
        model=MODEL, prompt=question(index), seed=index, extra_body={"structured_outputs": {"regex": PLATE}}
    )
    assert re.fullmatch(PLATE, answer.choices[0].text)
    return answer.choices[0].text


async def response(clients: Clients, index: int) -> str:
    """Of the Responses API, streamed."""
    fields: dict[str, Any] = {"model": MODEL, "input": question(index), "max_output_tokens": 60, "temperature": 0}
    async with clients.openai.responses.stream(**fields) as stream:
        final = await stream.get_final_response()
    return final.output_text


async def message(clients: Clients, index: int) -> str:
    """Of the Messages API, streamed, with a call that must be made."""
    tools: Any = [{"name": "save_person", "input_schema": PERSON, "strict": True}]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    body: Any = {"temperature": 0}
    messages: Any = [{"role": "user", "content": question(index)}]
    async with clients.anthropic.messages.stream(
        model=MODEL, max_tokens=200, messages=messages, tools=tools, tool_choice=choice, extra_body=body
    ) as stream:
        final = await stream.get_final_message()
    (block,) = [block.to_dict() for block in final.content if block.type == "tool_use"]
    jsonschema.validate(block["input"], PERSON)
    return json.dumps(block["input"])


async def adapter(clients: Clients, index: int) -> str:
    """A sampled chat with one of two adapters, streamed."""
    fields = chat(index, stream=True, temperature=0.8) | {"model": ADAPTERS[index % len(ADAPTERS)]}
    stream = await clients.openai.chat.completions.create(**fields)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def embedding(clients: Clients, index: int) -> list[float]:
    answer = await clients.openai.embeddings.create(model=MODEL, input=question(index))
    return answer.data[0].embedding


async def image(clients: Clients, index: int) -> str:
    """A sampled chat about two images, one of which others have too, streamed."""
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(random_areas(seed))}} for seed in (index, 100 + index % 3)
    ]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": question(index)}]}]
    fields = chat(index, stream=True, temperature=0.8) | {"model": IMAGE_MODEL, "messages": messages}
    stream = await clients.openai.chat.completions.create(**fields)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


Answer = str | list[float]
KINDS: tuple[Callable[[Clients, int], Awaitable[Answer]], ...] = (
    plain,
    schema,
    tool,
    regex,
    response,
    message,
    adapter,
    embedding,
    image,
)


def answers(clients: Clients) -> list[Awaitable[Answer]]:
    return [KINDS[index % len(KINDS)](clients, index // len(KINDS)) for index in range(CLIENTS)]


def like(answer: Answer) -> Any:
    """Equals the answer. The sums of an embedding may be added in parts."""
    return answer if isinstance(answer, str) else pytest.approx(answer, abs=1e-5)


class Service:
    """A gateway with two engines of each model."""

    def __init__(self, stack: ExitStack, image_model: Path) -> None:
        builtin = ["--model=builtin", "--enable-lora", *(f"--lora-modules={name}=builtin:{name}" for name in ADAPTERS)]
        images = [f"--model={image_model}", f"--served-model-name={IMAGE_MODEL}", "--max-num-batched-tokens=256"]

        def start(flags: list[str]) -> tuple[subprocess.Popen[bytes], str]:
            return stack.enter_context(engine_process(*flags, env={"OMP_NUM_THREADS": "1"}))

        with ThreadPoolExecutor() as executor:
            engines = list(executor.map(start, [builtin, images] * 2))
        self.victims = [process for process, _ in engines[:2]]  # one of each model
        first, *others = (address for _, address in engines)
        arguments = [argument for address in others for argument in ("--engine", address)]
        _, port = stack.enter_context(gateway_process(first, *arguments))
        wait_for_models(port, (MODEL, IMAGE_MODEL))
        self.url = f"http://127.0.0.1:{port}"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with ExitStack() as stack:
        yield Service(stack, make_image_model(tmp_path, "qwen3_vl"))


@pytest.mark.timeout(400)
async def test_mixed_requests_together_and_with_killed_engines_are_equal_to_each_alone(service: Service) -> None:
    async with open_clients(service.url) as clients:
        alone = [await answer for answer in answers(clients)]
        expected = [like(answer) for answer in alone]
        assert list(await asyncio.gather(*answers(clients))) == expected
        pending = [asyncio.ensure_future(answer) for answer in answers(clients)]
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for process in service.victims:
            process.kill()
        assert list(await asyncio.gather(*pending)) == expected
