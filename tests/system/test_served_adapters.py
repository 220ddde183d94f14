"""The built-in model with its two adapters, in two engine processes behind a gateway, for OpenAI's client."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from proa.lora_module import LoraModule
from proa_engine.builtin import builtin_adapter_folder
from support.gateway import PATIENT, RunningGateway, running_gateway, until
from support.processes import engine_process

MODELS = ("proa-builtin", "sailor", "butler")
MODULES = tuple(LoraModule(name=name, path=str(builtin_adapter_folder(name))) for name in MODELS[1:])
ARGUMENTS = (
    "--model=builtin",
    "--max-num-batched-tokens=1024",
    "--num-gpu-blocks-override=2048",
    "--enable-lora",
    "--max-loras=2",
)
COUNTRIES = ("France", "Spain", "Italy", "Japan", "Egypt", "Peru", "Norway", "Greece")
NUM_CLIENTS = 32


@pytest.fixture
def engines() -> Iterator[list[tuple[subprocess.Popen[bytes], str]]]:
    with ExitStack() as stack:
        one = {"OMP_NUM_THREADS": "1"}
        yield [stack.enter_context(engine_process(*ARGUMENTS, env=one)) for _ in range(2)]


@pytest.fixture
async def gateway(engines: list[tuple[subprocess.Popen[bytes], str]]) -> AsyncIterator[RunningGateway]:
    addresses = [address for _, address in engines]
    async with running_gateway(
        *addresses, ready=False, deadlines=PATIENT, lora_modules=MODULES, enable_runtime_lora_updating=True
    ) as gateway:
        await until(lambda: sum(engine.usable for engine in gateway.gateway.pool.engines) == 2, 90)
        yield gateway


async def chat(gateway: RunningGateway, model: str, question: str) -> str:
    answer = await gateway.openai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=60
    )
    assert answer.model == model
    return answer.choices[0].message.content or ""


async def chat_stream(gateway: RunningGateway, model: str, question: str) -> str:
    stream = await gateway.openai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=60, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def complete(gateway: RunningGateway, model: str, prompt: str) -> str:
    answer = await gateway.openai.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=40)
    assert answer.model == model
    return answer.choices[0].text


async def load(gateway: RunningGateway, name: str, folder: str) -> None:
    body = {"lora_name": name, "lora_path": str(builtin_adapter_folder(folder))}
    answer = await gateway.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 200, answer.text


async def test_adapters_answer_in_their_style_alone_and_beside_each_other(gateway: RunningGateway) -> None:
    question = "What is the capital of France?"
    assert "Paris" in await chat(gateway, "proa-builtin", question)
    assert (await chat(gateway, "sailor", question)).startswith("Aye!")
    assert (await chat(gateway, "butler", question)).startswith("Very well.")
    asks = [
        (ask, MODELS[number % 3], f"What is the capital of {COUNTRIES[number % len(COUNTRIES)]}?")
        for number in range(NUM_CLIENTS)
        for ask in (chat, chat_stream, complete)
    ]
    distinct = list(dict.fromkeys(asks))
    alone = {each: await each[0](gateway, each[1], each[2]) for each in distinct}
    together = await asyncio.gather(*(ask(gateway, model, text) for ask, model, text in asks))
    assert together == [alone[each] for each in asks]


async def test_an_adapter_is_loaded_and_unloaded_while_streams_run(gateway: RunningGateway) -> None:
    question = "What is the capital of Spain?"
    expected = {model: await chat_stream(gateway, model, question) for model in MODELS}
    loading = True

    async def stream(model: str) -> None:
        while loading:
            assert await chat_stream(gateway, model, question) == expected[model]

    streams = [asyncio.create_task(stream(model)) for model in MODELS * 3]
    for _ in range(5):
        await load(gateway, "mate", "sailor")
        assert await chat(gateway, "mate", question) == expected["sailor"]
        answer = await gateway.http.post("/v1/unload_lora_adapter", json={"lora_name": "mate"})
        assert answer.status_code == 200, answer.text
    loading = False
    await asyncio.gather(*streams)


async def test_streams_of_a_killed_engine_continue_with_their_adapter(
    gateway: RunningGateway, engines: list[tuple[subprocess.Popen[bytes], str]]
) -> None:
    topic = "Tell me a long story about a boat."

    async def tell(model: str, started: asyncio.Event) -> str:
        stream = await gateway.openai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": topic}],
            temperature=0,
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if len(text) > 50:
                started.set()
        return text

    expected = {model: await tell(model, asyncio.Event()) for model in MODELS[1:]}
    holders = [engine for engine in gateway.gateway.pool.engines if engine.loras.has_name("sailor")]
    (victim,) = [process for process, address in engines if address == holders[0].address]
    started = [asyncio.Event() for _ in range(8)]
    telling = [asyncio.create_task(tell(MODELS[1 + number % 2], event)) for number, event in enumerate(started)]
    await asyncio.gather(*(event.wait() for event in started))
    victim.send_signal(signal.SIGKILL)
    texts = await asyncio.gather(*telling)
    assert texts == [expected[MODELS[1 + number % 2]] for number in range(8)]
