"""64 clients at once with every API and constraint, adapters and embeddings; an engine is killed meanwhile. Each answer
is valid, and equal to the same request alone."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from support.processes import engine_process, gateway_process

CLIENTS = 64
MODEL = "proa-builtin"
ADAPTERS = ("sailor", "butler")
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
)


def answers(clients: Clients) -> list[Awaitable[Answer]]:
    return [KINDS[index % len(KINDS)](clients, index // len(KINDS)) for index in range(CLIENTS)]


def like(answer: Answer) -> Any:
    """Equals the answer. The sums of an embedding may be added in parts."""
    return answer if isinstance(answer, str) else pytest.approx(answer, abs=1e-5)


class Service:
    """A gateway with two engines."""

    def __init__(self, stack: ExitStack) -> None:
        flags = ["--model", "builtin", "--enable-lora"]
        for name in ADAPTERS:
            flags += ["--lora-modules", f"{name}=builtin:{name}"]
        engines = [stack.enter_context(engine_process(*flags, env={"OMP_NUM_THREADS": "1"})) for _ in range(2)]
        self.processes = [process for process, _ in engines]
        first, second = (address for _, address in engines)
        _, port = stack.enter_context(gateway_process(first, "--engine", second))
        self.url = f"http://127.0.0.1:{port}"


@pytest.fixture
def service() -> Iterator[Service]:
    with ExitStack() as stack:
        yield Service(stack)


@pytest.mark.timeout(400)
async def test_mixed_requests_together_and_with_a_killed_engine_are_equal_to_each_alone(service: Service) -> None:
    async with open_clients(service.url) as clients:
        alone = [await answer for answer in answers(clients)]
        expected = [like(answer) for answer in alone]
        assert list(await asyncio.gather(*answers(clients))) == expected
        pending = [asyncio.ensure_future(answer) for answer in answers(clients)]
        await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        service.processes[0].kill()
        assert list(await asyncio.gather(*pending)) == expected
