"""Embeddings of the built-in model through gateway and engine, beside completions, and while an engine is killed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import proa_engine.builtin
from support.processes import engine_process, gateway_process, wait_for_engines

MODEL = Path(proa_engine.builtin.__file__).parent / "model"
ENGINE = ("--model=builtin", "--max-num-batched-tokens=1024")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
CLIENTS = 64
TEXTS = [f"Boat {index} has {index % 7} sails and {index // 3} people. " * (1 + index % 5) for index in range(24)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with engine_process(*ENGINE, env=ONE_THREAD) as (_, address), gateway_process(address) as (_, port):
        yield f"http://127.0.0.1:{port}"


def body(index: int) -> tuple[str, dict[str, Any]]:
    """A client's path and body: every second one completes a text, the others embed one to four."""
    if index % 2:
        prompt = f"The boat with {index} sails"
        return "/v1/completions", {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    start = index % len(TEXTS)
    return "/v1/embeddings", {"input": TEXTS[start : start + 1 + index % 4]}


def result(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    value = answer.json()
    if value["object"] == "list":
        return [each["embedding"] for each in value["data"]]
    return value["choices"][0]["text"]


def assert_same(results: list[Any], expected: list[Any]) -> None:
    for one, other in zip(results, expected, strict=True):
        if isinstance(other, str):
            assert one == other
        else:  # products of other shapes round otherwise
            for row, alone in zip(one, other, strict=True):
                assert row == pytest.approx(alone, abs=1e-4)


async def ask_all(url: str) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        answers = await asyncio.gather(*(client.post(path, json=fields) for path, fields in map(body, range(CLIENTS))))
    return [result(answer) for answer in answers]


def ask_alone(url: str) -> list[Any]:
    with httpx.Client(base_url=url, timeout=120) as client:
        return [result(client.post(path, json=fields)) for path, fields in map(body, range(CLIENTS))]


def test_embeddings_are_those_of_sentence_transformers(url: str) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(MODEL), device="cpu", model_kwargs={"dtype": torch.float32})
    for batch in (TEXTS[:1], TEXTS):
        rows = result(httpx.post(f"{url}/v1/embeddings", json={"input": batch}, timeout=60))
        expected = reference.encode(batch, normalize_embeddings=True)
        cosines = (torch.tensor(rows) * torch.tensor(expected)).sum(dim=1)
        assert cosines.min().item() > 0.9999


def test_scores_are_cosines_of_embeddings(url: str) -> None:
    query, *documents = TEXTS[:5]
    rows = result(httpx.post(f"{url}/v1/embeddings", json={"input": [query, *documents]}, timeout=60))
    cosines = [sum(a * b for a, b in zip(rows[0], row, strict=True)) for row in rows[1:]]
    ranked = httpx.post(f"{url}/rerank", json={"query": query, "documents": documents}, timeout=60).json()["results"]
    assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(cosines, reverse=True), abs=1e-4)


def test_answers_of_many_clients_are_those_of_each_alone(url: str) -> None:
    alone = ask_alone(url)
    assert_same(asyncio.run(ask_all(url)), alone)


def test_no_request_is_lost_when_an_engine_is_killed(url: str) -> None:
    alone = ask_alone(url)
    with (
        engine_process(*ENGINE, env=ONE_THREAD) as (victim, first),
        engine_process(*ENGINE, env=ONE_THREAD) as (_, second),
        gateway_process(first, "--engine", second) as (_, port),
    ):
        wait_for_engines(port, 2)
        assert_same(asyncio.run(ask_and_kill(f"http://127.0.0.1:{port}", victim.pid)), alone)


async def ask_and_kill(url: str, pid: int) -> list[Any]:
    """Ask for all while the engine with this process id dies."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        asking = [asyncio.ensure_future(client.post(path, json=fields)) for path, fields in map(body, range(CLIENTS))]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        os.kill(pid, signal.SIGKILL)
        return [result(answer) for answer in await asyncio.gather(*asking)]
