"""Decisions through gateway and engine: alone, all in one request, beside a load, and while an engine is killed."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_uppercase, digits
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from support.processes import engine_process, gateway_process, wait_for_engines
from support.tiny_models import make_tiny_model

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
BOATS = "".join(f"Boat {index} has {index % 7} sails. " for index in range(40))
INPUT = [
    {"role": "system", "content": "Answer questions about the boats of this port."},
    {"role": "user", "content": BOATS},
    {"role": "assistant", "content": "These are all boats."},
]
QUESTIONS: list[dict[str, Any]] = [
    question
    for number, size in enumerate((24, 26, 30, 50))
    for question in (
        {"type": "predicate", "name": f"sails {number}", "instructions": f"Has boat {number} at least two sails?"},
        {
            "type": "score",
            "instructions": f"How many boats have {number} sails?",
            "levels": [{"label": f"{index} boats"} for index in range(26)],
        },
        {
            "type": "choice",
            "instructions": f"Which of them has the most sails, but for {number}?",
            "choices": [{"value": f"boat {index}"} for index in range(size)],
        },
    )
]


# The built-in model was not trained to answer with labels. In an argument of a call it writes letters.
BEGUN = (
    "{{ '<|begin|>' }}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    """{{ '<|assistant|>{"name": "answer", "arguments": {"label": "' }}{% endif %}"""
)


def make_model(folder: Path) -> Path:
    """A model that writes a letter or digit with a fair probability. Its tokens are bytes."""
    make_tiny_model(folder, "qwen3", max_position_embeddings=4096)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][[ord(letter) for letter in ascii_uppercase + digits]] *= 4
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=["builtin", "tiny"])
def flags(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Of the engine and of the gateway."""
    if request.param == "builtin":
        return ["--model=builtin", "--max-num-batched-tokens=512"], ["--chat-template", BEGUN]
    folder = make_model(tmp_path_factory.mktemp("model"))
    return [f"--model={folder}", "--max-num-batched-tokens=512"], []


@pytest.fixture(scope="module")
def url(flags: tuple[list[str], list[str]]) -> Iterator[str]:
    engine, gateway = flags
    with engine_process(*engine, env=ONE_THREAD) as (_, address), gateway_process(address, *gateway) as (_, port):
        yield f"http://127.0.0.1:{port}"


def answers(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    found: list[Any] = response.json()["answers"]
    return found


def decide(url: str, questions: Sequence[dict[str, Any]]) -> list[Any]:
    # A request for one question finds nothing that another has computed.
    body = {"input": INPUT, "questions": questions, "cache_salt": str(len(questions)) + questions[0]["instructions"]}
    return answers(httpx.post(f"{url}/v1/decisions", json=body, timeout=120))


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert one["type"] == other["type"]
        assert one.get("choice") == other.get("choice")
        for name in ("probability", "score", "confidence"):
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), abs=1e-6)
        for ours, theirs in zip(one.get("probabilities", ()), other.get("probabilities", ()), strict=True):
            assert ours["probability"] == pytest.approx(theirs["probability"], abs=1e-6)


@pytest.fixture(scope="module")
def alone(url: str) -> list[Any]:
    """The answers of requests for one question each."""
    return [answer for question in QUESTIONS for answer in decide(url, [question])]


def test_answers_of_one_request_are_those_of_a_request_for_each_question(url: str, alone: list[Any]) -> None:
    assert_same(decide(url, QUESTIONS), alone)
    assert sum(answer["type"] != "refusal" for answer in alone) >= 2, alone
    for answer in alone:
        if "probabilities" in answer:
            assert sum(each["probability"] for each in answer["probabilities"]) == pytest.approx(1)


def test_the_input_is_computed_once(url: str) -> None:
    body = {"input": INPUT, "questions": QUESTIONS, "cache_salt": "once"}
    first, second = (httpx.post(f"{url}/v1/decisions", json=body, timeout=120).json()["usage"] for _ in range(2))
    assert first["input_tokens"] == second["input_tokens"]
    assert first["input_tokens_details"]["cached_tokens"] == 0
    assert second["input_tokens_details"]["cached_tokens"] > 200


def test_answers_do_not_depend_on_the_load(url: str, alone: list[Any]) -> None:
    assert_same(asyncio.run(decide_beside_completions(url)), alone)


async def decide_beside_completions(url: str) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        loads = [
            asyncio.ensure_future(
                client.post("/v1/completions", json={"prompt": f"Boat {index}", "max_tokens": 64, "ignore_eos": True})
            )
            for index in range(24)
        ]
        body = {"input": INPUT, "questions": QUESTIONS, "cache_salt": "loaded"}
        found = answers(await client.post("/v1/decisions", json=body))
        assert {response.status_code for response in await asyncio.gather(*loads)} == {200}
        return found


def test_a_killed_engine_changes_no_answer(flags: tuple[list[str], list[str]], alone: list[Any]) -> None:
    engine, gateway = flags
    with (
        engine_process(*engine, env=ONE_THREAD) as (victim, first),
        engine_process(*engine, env=ONE_THREAD) as (_, second),
        gateway_process(first, "--engine", second, *gateway) as (_, port),
    ):
        wait_for_engines(port, 2)
        for found in asyncio.run(decide_and_kill(f"http://127.0.0.1:{port}", victim.pid)):
            assert_same(found, alone)


async def decide_and_kill(url: str, pid: int) -> list[list[Any]]:
    """Ask for all, several times, while the engine with this process id dies."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        bodies = [{"input": INPUT, "questions": QUESTIONS, "cache_salt": str(index)} for index in range(8)]
        asking = [asyncio.ensure_future(client.post("/v1/decisions", json=body)) for body in bodies]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        os.kill(pid, signal.SIGKILL)
        return [answers(response) for response in await asyncio.gather(*asking)]
