"""Tiny models with images, in engine processes behind a gateway.

Answers have the greedy tokens of `transformers` for the same pixels and its chat template. A repeated image is not
encoded again, a refused one disturbs no stream, and a killed engine loses none.
"""

import asyncio
import base64
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import AsyncOpenAI, BadRequestError, OpenAI
from PIL import Image

from proa.contract import PoolingParams, PoolingTask
from proa_engine import LLM, SamplingParams
from support.greedy import Expected
from support.image_files import data_url, encoded, random_areas
from support.image_models import chat_tokens, greedy_chat, make_image_model
from support.processes import engine_process, free_port, gateway_process, wait_for_models
from support.scrape import Scrape

SEEDS = {"qwen3_vl": 0, "qwen3_5": 1, "gemma3": 3, "gemma4": 0, "mistral3": 0}  # with which images decide the tokens
REPLICATED = "qwen"
PARALLEL = "tp2"  # of two ranks
ENGINES = {REPLICATED: "qwen3_vl", PARALLEL: "qwen3_vl", "qwen35": "qwen3_5", "gemma": "gemma3"}  # by served name
ENGINES |= {"gemma4": "gemma4", "mistral": "mistral3"}
NUM_TOKENS = 24
LONG = 800  # tokens of a stream during which an engine is killed, on a busy machine
ARGUMENTS = (
    "--max-model-len=1024",
    "--num-gpu-blocks-override=512",
    "--max-num-batched-tokens=128",
    "--max-num-seqs=9",
)
PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?<|im_end|>\n<|im_start|>assistant\n"
Turns = Sequence[Sequence[str | Image.Image]]  # contents of the user's messages, with answers between them


@dataclass(frozen=True)
class Service:
    """A gateway before two engines of `REPLICATED` and one of each other model."""

    url: str
    folders: dict[str, Path]  # by served name
    replicas: list[subprocess.Popen[bytes]]
    metrics_ports: dict[str, int]  # of the last engine with that name

    def encoded_images(self, name: str) -> float:
        """Images that the only engine of this name has encoded."""
        return self.scrape(name).value("proa_engine_encoded_images_total")

    def busy_replica(self) -> subprocess.Popen[bytes]:
        """One that runs requests, of which there must be some."""
        return self.replicas[1 if self.scrape(REPLICATED).value("vllm:num_requests_running") else 0]

    def scrape(self, name: str) -> Scrape:
        return Scrape(httpx.get(f"http://127.0.0.1:{self.metrics_ports[name]}/metrics", timeout=10, verify=False).text)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folders = {kind: make_image_model(tmp_path_factory.mktemp(kind), kind, seed) for kind, seed in SEEDS.items()}
    named = {name: folders[kind] for name, kind in ENGINES.items()}
    ports = {name: free_port() for name in ENGINES}

    def start(name: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
        command = ("--model", str(named[name]), "--served-model-name", name, *ARGUMENTS, *arguments)
        return stack.enter_context(engine_process(*command, env={"OMP_NUM_THREADS": "1"}))

    with ExitStack() as stack:
        with ThreadPoolExecutor() as executor:
            starting = [executor.submit(start, REPLICATED)]
            for name, port in ports.items():
                ranks = ("--tensor-parallel-size=2",) if name == PARALLEL else ()
                starting.append(executor.submit(start, name, f"--metrics-port={port}", *ranks))
        engines = [each.result() for each in starting]
        first, *others = (address for _, address in engines)
        arguments = [argument for address in others for argument in ("--engine", address)]
        _, port = stack.enter_context(gateway_process(first, *arguments))
        wait_for_models(port, ENGINES)
        replicas = [process for process, _ in engines[:2]]
        yield Service(f"http://127.0.0.1:{port}", named, replicas, ports)


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat_messages(turns: Turns) -> Any:
    return conversation(turns, lambda image: {"type": "image_url", "image_url": {"url": data_url(image)}})


def conversation(turns: Turns, image_part: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages += [{"role": "assistant", "content": "Yes."}] if messages else []
        parts = [{"type": "text", "text": part} if isinstance(part, str) else image_part(part) for part in turn]
        messages.append({"role": "user", "content": parts})
    return messages


def prompt_and_tokens(folder: Path, turns: Turns, num_tokens: int = NUM_TOKENS) -> tuple[list[int], Expected]:
    """Of `transformers`."""
    messages = conversation(turns, lambda image: {"type": "image"})
    images = [part for turn in turns for part in turn if not isinstance(part, str)]
    return chat_tokens(folder, messages, images), greedy_chat(folder, messages, images, num_tokens)


def tokens_of(chunk: Any) -> list[int]:
    """Of an event of a stream; the first one has none."""
    return [token for choice in chunk.choices for token in getattr(choice, "token_ids", None) or ()]


TURNS: dict[str, Turns] = {
    "one image": [[random_areas(1), "What is this?"]],
    "two images": [["First ", random_areas(2, 50, 90), " and then ", random_areas(3), ", which?"]],
    "several turns": [[random_areas(4), "Is it?"], ["No image."], ["And ", random_areas(1), random_areas(5, 130, 40)]],
}


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("name", ENGINES)
def test_answers_have_the_greedy_tokens_of_transformers(
    service: Service, client: OpenAI, name: str, turns: Turns
) -> None:
    prompt, expected = prompt_and_tokens(service.folders[name], turns)
    fields: Any = {
        "model": name,
        "messages": chat_messages(turns),
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    answer: Any = client.chat.completions.create(**fields)
    stream: Any = client.chat.completions.create(**fields, stream=True)
    streamed = [token for chunk in stream for token in tokens_of(chunk)]
    assert expected.num_sure >= NUM_TOKENS // 2
    assert answer.choices[0].token_ids[: expected.num_sure] == expected.token_ids[: expected.num_sure]
    assert streamed == answer.choices[0].token_ids
    assert answer.usage.prompt_tokens == len(prompt)


def test_responses_and_messages_give_the_same_text_as_chats(service: Service, client: OpenAI) -> None:
    image, text = random_areas(1), "What is this?"
    answer: Any = client.chat.completions.create(
        model=REPLICATED, messages=chat_messages([[image, text]]), temperature=0, max_tokens=NUM_TOKENS
    )
    parts: Any = [{"type": "input_image", "image_url": data_url(image)}, {"type": "input_text", "text": text}]
    response: Any = client.responses.create(
        model=REPLICATED, input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=NUM_TOKENS
    )
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded(image, "PNG")).decode()}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    with Anthropic(base_url=service.url, api_key="none", max_retries=0) as anthropic:
        message: Any = anthropic.messages.create(
            model=REPLICATED,
            max_tokens=NUM_TOKENS,
            messages=[{"role": "user", "content": blocks}],
            extra_body={"temperature": 0},
        )
    assert response.output_text == answer.choices[0].message.content
    assert "".join(block.text for block in message.content) == answer.choices[0].message.content
    cached = message.usage.cache_read_input_tokens  # which Anthropic's input_tokens leave out
    assert answer.usage.prompt_tokens == response.usage.input_tokens == message.usage.input_tokens + cached


def test_a_repeated_image_is_not_encoded_again(service: Service, client: OpenAI) -> None:
    """With its prefix in the KV cache, and behind another text, where it is found among the encoded images."""

    def ask(*parts: str | Image.Image) -> Any:
        return client.chat.completions.create(
            model=PARALLEL, messages=chat_messages([parts]), temperature=0, max_tokens=4
        )

    image = random_areas(77, 120, 100)
    before = service.encoded_images(PARALLEL)
    first = ask(image, "What is this?")
    assert service.encoded_images(PARALLEL) == before + 1
    again = ask(image, "What is this?")
    ask("Another text, then ", image)
    assert service.encoded_images(PARALLEL) == before + 1
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens // 2


async def tell(openai: AsyncOpenAI, turns: Turns, started: asyncio.Event) -> list[int]:
    """The tokens of a stream. `started` is set long before its end."""
    stream: Any = await openai.chat.completions.create(
        model=REPLICATED,
        messages=chat_messages(turns),
        temperature=0,
        max_tokens=LONG,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens: list[int] = []
    async for chunk in stream:
        tokens += tokens_of(chunk)
        if len(tokens) > 20:
            started.set()
    return tokens


async def test_a_hostile_image_is_refused_while_a_stream_goes_on(service: Service) -> None:
    bomb = encoded(Image.new("1", (40_000, 40_000)), "PNG")  # 1.6 billion pixels
    damaged = encoded(random_areas(1), "PNG")[:-200]
    turns: Turns = [[random_areas(1), "Go on."]]
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as openai:
        expected = await tell(openai, turns, asyncio.Event())
        started = asyncio.Event()
        stream = asyncio.create_task(tell(openai, turns, started))
        await started.wait()
        for data in (bomb, damaged, b"no image"):
            part = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(data).decode()}}
            messages: Any = [{"role": "user", "content": [part]}]
            with pytest.raises(BadRequestError):
                await openai.chat.completions.create(model=REPLICATED, messages=messages)
        assert not stream.done()
        assert await stream == expected


@pytest.fixture(scope="module")
def llm(service: Service) -> Iterator[LLM]:
    llm = LLM(
        str(service.folders[REPLICATED]), max_model_len=640, num_gpu_blocks_override=64, max_num_batched_tokens=48
    )
    yield llm
    llm.llm_engine.shutdown()


def test_the_offline_llm_has_the_same_tokens_beside_plain_prompts(service: Service, llm: LLM) -> None:
    folder = service.folders[REPLICATED]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [prompt_and_tokens(folder, turns) for turns in TURNS.values()]
    chats: Any = [
        conversation(turns, lambda image: {"type": "image_pil", "image_pil": image}) for turns in TURNS.values()
    ]
    plain = [{"role": "user", "content": "No image."}]
    token_ids = llm.llm_engine.tokenizer.encode(PROMPT) if llm.llm_engine.tokenizer else []
    alone = llm.chat(plain, params, use_tqdm=False)
    outputs = llm.chat([*chats, plain], params, use_tqdm=False)
    data = {"multi_modal_data": {"image": random_areas(1)}}
    prompts: Any = [{"prompt": PROMPT, **data}, {"prompt_token_ids": token_ids, **data}]
    generated = llm.generate(prompts, params, use_tqdm=False)
    assert outputs[-1].outputs == alone[0].outputs
    for output, (prompt, tokens) in zip(
        [*outputs[:-1], *generated], [*expected, expected[0], expected[0]], strict=True
    ):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids[: tokens.num_sure] == tokens.token_ids[: tokens.num_sure]


def test_the_offline_llm_pools_prompts_with_images(llm: LLM) -> None:
    prompt = {"prompt": PROMPT, "multi_modal_data": {"image": random_areas(1)}}
    named = (5, 9)
    (pooled,) = llm.encode(
        prompt, PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=named), use_tqdm=False
    )
    (generated,) = llm.generate(prompt, SamplingParams(max_tokens=1, logprob_token_ids=named), use_tqdm=False)
    (logprobs,) = generated.outputs[0].logprobs or [{}]
    assert pooled.outputs.data.tolist() == pytest.approx([logprobs[token].logprob for token in named], abs=1e-4)


async def test_streams_of_a_killed_engine_continue_with_their_images(service: Service) -> None:
    chats: list[Turns] = [[[random_areas(seed, 128, 128), f"Tell me of {seed}."]] for seed in range(6)]
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as openai:
        expected = [await tell(openai, turns, asyncio.Event()) for turns in chats]
        started = [asyncio.Event() for _ in chats]
        streams = [asyncio.create_task(tell(openai, turns, event)) for turns, event in zip(chats, started, strict=True)]
        await asyncio.gather(*(event.wait() for event in started))
        service.busy_replica().kill()
        assert await asyncio.gather(*streams) == expected
    async with httpx.AsyncClient(base_url=service.url) as http:
        page = Scrape((await http.get("/metrics")).text)
    assert page.value("proa_gateway_failovers_total", outcome="resumed") > 0
