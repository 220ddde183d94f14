"""Engine processes that share a disk: a killed one's blocks are read by the next, on one rank and on two."""

import time
import urllib.request
from pathlib import Path

import grpc
import pytest

from proa.engine.v1 import service_pb2_grpc
from support.engine_client import generate_request
from support.processes import engine_process, free_port, kill_with_children
from support.scrape import Scrape

PROMPT = [5 + index % 200 for index in range(1000)]
NUM_CACHED = 992  # all blocks before the last token
FLAGS = ("--model=builtin", "--num-gpu-blocks-override=140", "--max-model-len=2048", "--kv-offloading-size=0.3")


def ask(address: str, prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were cached."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.EngineServiceStub(channel)
        message = generate_request(prompt, max_tokens=8, temperature=0.0)
        outputs = [response.output for response in stub.Generate(message, timeout=60)]
    return [token for output in outputs for token in output.new_token_ids], outputs[-1].num_cached_tokens


def press(address: str) -> None:
    """Ask other prompts, until the device has nothing of the first one."""
    for step in (3, 7, 9):
        ask(address, [5 + (index * step) % 200 for index in range(1000)])


def wait_until_on_disk(metrics_port: int) -> None:
    """Wait until the engine knows that all ranks have the prompt's blocks on disk."""
    deadline = time.monotonic() + 60
    while num_on_disk(metrics_port) < NUM_CACHED // 16:
        assert time.monotonic() < deadline, "the prompt's blocks are not on disk"
        time.sleep(0.05)


def num_on_disk(metrics_port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
        return Scrape(answer.read().decode()).value("proa_engine_kv_disk_blocks")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_next_engine_reads_what_a_killed_one_has_written(num_ranks: int, tmp_path: Path) -> None:
    flags = (*FLAGS, f"--tensor-parallel-size={num_ranks}", f"--kv-disk-path={tmp_path}", "--kv-disk-size=1")
    port = free_port()
    metrics = f"--metrics-port={port}"
    with engine_process(*flags, metrics) as (process, address):
        expected, _ = ask(address)
        press(address)
        assert ask(address) == (expected, NUM_CACHED)
        wait_until_on_disk(port)
        kill_with_children(process.pid)
        process.wait()
    assert len(list(tmp_path.glob("*/0/rank-*"))) == num_ranks
    with engine_process(*flags, metrics) as (_, address), engine_process(*flags) as (_, other_address):
        wait_until_on_disk(port)
        assert ask(address) == (expected, NUM_CACHED)
        assert ask(other_address) == (expected, 0), "the first engine has the folder"
    assert len(list(tmp_path.glob("*/*/rank-0"))) == 2
