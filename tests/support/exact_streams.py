"""Streams whose output is known: requests of many kinds, their answers, and engines that can be killed and restarted.

The arithmetic of the built-in model on a CPU does not depend on the batch, so a request's output is always the same.
"""

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx

from support.processes import engine_process, free_port
from support.scrape import Scrape

NUM_STREAMS = 50
MAX_TOKENS = 100
ARGUMENTS = (
    "--model=builtin",
    "--max-num-batched-tokens=1024",
    "--num-gpu-blocks-override=2048",
    "--drain-timeout=0.2",
)
TOPICS = ("a boat with {} sails", "the number {}", "{} cats 🐈 and a naïve café", "{} people who say who they are")
FAILOVERS = "proa_gateway_failovers_total"
Answer = dict[int, dict[str, Any]]  # by choice; -1: the usage


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


async def read_stream(
    http: httpx.AsyncClient, index: int, answer: Answer, on_event: Callable[[], None] = lambda: None, **fields: Any
) -> None:
    """Send the request of `body(index)` with more `fields`; add each event to `answer`.
    Raises `httpx.TransportError` if the connection ends, and AssertionError for a status other than 200, an event with
    an error or a missing end."""
    route, request = body(index)
    last = ""
    async with http.stream("POST", route, json=request | fields, timeout=90) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                on_event()
                _take(json.loads(line[6:]), answer)
            elif line:
                last = line
    assert last == "data: [DONE]"


def is_beginning(part: Answer, whole: Answer) -> bool:
    """Whether what came of a stream that was cut is how the whole answer begins."""
    return all(
        value is None or value == whole[index][name] or (name != "ending" and whole[index][name][: len(value)] == value)
        for index, said in part.items()
        for name, value in said.items()
    )


def resumed(page: str) -> float:
    """The sequences that another engine has continued, on a gateway's page of metrics."""
    counts = {dict(labels)["outcome"]: n for (name, labels), n in Scrape(page).samples.items() if name == FAILOVERS}
    return counts.get("resumed", 0.0)


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
    """Two engines with the built-in model at fixed ports. `start` waits until the model is loaded."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.ports = [free_port(), free_port()]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        with ThreadPoolExecutor() as executor:
            list(executor.map(self.start, range(2)))

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    def start(self, which: int) -> None:
        engine = engine_process(*ARGUMENTS, port=self.ports[which], env={"OMP_NUM_THREADS": "1"})
        process, _ = self._stack.enter_context(engine)
        self.processes[which] = process
