"""Failover of fifty streams: their output is the same as without the failure.

Two engines with the built-in model, as processes of their own; a gateway before both. The CPU's arithmetic does not
depend on the batch, so the tokens must be exactly those of an undisturbed run.
"""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from proa_gateway.config import Deadlines
from support.gateway import RunningGateway, running_gateway, until
from support.processes import engine_process, free_port
from support.scrape import Scrape

NUM_STREAMS = 50
MAX_TOKENS = 100
DRAWN_SEED = 0x0DDB1A5E5BAD5EED  # what the gateway draws for requests without a seed
ARGUMENTS = (
    "--model=builtin",
    "--max-num-batched-tokens=1024",
    "--num-gpu-blocks-override=2048",
    "--drain-timeout=0.2",
)
TOPICS = ("a boat with {} sails", "the number {}", "{} cats 🐈 and a naïve café", "{} people who say who they are")
FAILOVERS = "proa_gateway_failovers_total"
Answer = dict[int, dict[str, Any]]  # by choice


def body(index: int) -> tuple[str, dict[str, Any]]:
    """Return route and body of a stream. They vary in sampling parameters, output formats and ways to end."""
    topic = TOPICS[index % len(TOPICS)].format(index)
    common: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    common["return_token_ids"] = index % 2 == 0
    choosing: dict[str, Any] = (
        {"temperature": 0},
        {"temperature": 0.9, "seed": index},
        {"temperature": 1.2},
        {"temperature": 2.0, "top_p": 0.99, "seed": index},  # characters in pieces
        {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.4, "min_tokens": 60, "ignore_eos": False},
    )[index % 5]
    if index % 7 == 3:
        return "/v1/completions", {**common, **choosing, "prompt": f"Of {topic}:", "n": 2, "logprobs": 2}
    chat = {**common, **choosing, "messages": [{"role": "user", "content": f"Tell me about {topic}."}]}
    if index % 7 == 1:
        chat |= {"logprobs": True, "top_logprobs": 2}
    if index % 7 == 5:
        chat |= {"stop": [" the", "."], "min_tokens": 40}
    return "/v1/chat/completions", chat


class Streams:
    """Fifty concurrent streams. `num_events` counts the events received, by stream."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.num_events = [0] * NUM_STREAMS

    async def run(self) -> list[Answer]:
        return list(await asyncio.gather(*(self._stream(index) for index in range(NUM_STREAMS))))

    async def advance(self, count: int) -> None:
        """Wait until every unfinished stream has received `count` more events."""
        wanted = [num_events + count for num_events in self.num_events]
        await until(lambda: all(now >= then for now, then in zip(self.num_events, wanted, strict=True)), 60)

    async def _stream(self, index: int) -> Answer:
        route, request = body(index)
        answer, last = Answer(), ""
        async with self._http.stream("POST", route, json=request, timeout=90) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.num_events[index] += 1
                    self._take(json.loads(line[6:]), answer)
                elif line:
                    last = line
        assert last == "data: [DONE]"
        self.num_events[index] = 1_000_000
        return answer

    @staticmethod
    def _take(event: dict[str, Any], answer: Answer) -> None:
        assert "error" not in event, event
        if event.get("usage"):
            answer[-1] = {name: event["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        for choice in event["choices"]:
            said = answer.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": [], "ending": None})
            assert said["ending"] is None
            said["text"] += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            said["logprobs"] += logprobs_of(choice)
            said["token_ids"] += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                said["ending"] = (choice["finish_reason"], choice.get("stop_reason"))


def logprobs_of(choice: dict[str, Any]) -> list[tuple[str, float]]:
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:
        return [(entry["token"], round(entry["logprob"], 4)) for entry in logprobs["content"]]
    return [
        (token, round(value, 4))
        for token, value in zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True)
    ]


class Replicas:
    """Two engines at fixed ports. `start` waits until the model is loaded."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.ports = [free_port(), free_port()]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.undisturbed: list[Answer] = []
        with ThreadPoolExecutor() as executor:
            list(executor.map(self.start, range(2)))

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    def start(self, which: int) -> None:
        engine = engine_process(*ARGUMENTS, port=self.ports[which], env={"OMP_NUM_THREADS": "1"})
        process, _ = self._stack.enter_context(engine)
        self.processes[which] = process


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(stack)


@pytest.fixture
async def gateway(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningGateway]:
    monkeypatch.setattr("proa_gateway.openai.sampling.secrets.randbits", lambda bits: DRAWN_SEED)
    async with running_gateway(*replicas.addresses, ready=False, deadlines=Deadlines(failover=60.0)) as gateway:
        await until(lambda: len(usable(gateway)) == 2, 60)
        yield gateway


def usable(gateway: RunningGateway) -> list[str]:
    return [engine.address for engine in gateway.gateway.pool.engines if engine.usable]


def resumed(gateway: RunningGateway) -> float:
    """Return the number of sequences that another engine has continued."""
    page = Scrape(gateway.gateway.metrics.render().decode())
    counts = {dict(labels)["outcome"]: n for (name, labels), n in page.samples.items() if name == FAILOVERS}
    return counts.get("resumed", 0.0)


@pytest.fixture
async def undisturbed(gateway: RunningGateway, replicas: Replicas) -> list[Answer]:
    """The output of every stream without a failure."""
    if not replicas.undisturbed:
        replicas.undisturbed = await Streams(gateway.http).run()
    return replicas.undisturbed


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_of_a_stopped_engine_end_with_the_same_output(
    number: signal.Signals, gateway: RunningGateway, replicas: Replicas, undisturbed: list[Answer]
) -> None:
    streams = Streams(gateway.http)
    running = asyncio.create_task(streams.run())
    await streams.advance(3)
    replicas.processes[0].send_signal(number)
    assert await running == undisturbed
    assert resumed(gateway) > 5
    replicas.processes[0].wait()
    replicas.start(0)


async def test_streams_survive_the_loss_of_both_engines_if_one_is_restarted(
    gateway: RunningGateway, replicas: Replicas, undisturbed: list[Answer]
) -> None:
    streams = Streams(gateway.http)
    running = asyncio.create_task(streams.run())
    await streams.advance(3)
    replicas.processes[0].kill()
    await until(lambda: resumed(gateway) > 5, 60)
    before = resumed(gateway)
    replicas.processes[1].kill()
    restarting = asyncio.create_task(asyncio.to_thread(replicas.start, 0))
    assert await running == undisturbed
    assert resumed(gateway) - before > 5
    await restarting
