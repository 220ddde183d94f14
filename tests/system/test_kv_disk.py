"""Engine processes that share a disk: a killed one's blocks are read by the next, on one rank and on two."""

import os
import signal
import time
from pathlib import Path

import grpc
import psutil
import pytest

from proa.engine.v1 import service_pb2_grpc
from support.engine_client import generate_request
from support.processes import engine_process

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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_next_engine_reads_what_a_killed_one_has_written(num_ranks: int, tmp_path: Path) -> None:
    flags = (*FLAGS, f"--tensor-parallel-size={num_ranks}", f"--kv-disk-path={tmp_path}", "--kv-disk-size=1")
    with engine_process(*flags) as (process, address):
        expected, _ = ask(address)
        press(address)
        assert ask(address) == (expected, NUM_CACHED)
        time.sleep(2.0)  # its blocks are written
        children = psutil.Process(process.pid).children(recursive=True)
        for pid in (*(child.pid for child in children), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    assert len(list(tmp_path.glob("*/0/rank-*"))) == num_ranks
    with engine_process(*flags) as (_, address), engine_process(*flags) as (_, other_address):
        time.sleep(1.0)  # it has read the index
        assert ask(address) == (expected, NUM_CACHED)
        assert ask(other_address) == (expected, 0), "the first engine has the folder"
    assert len(list(tmp_path.glob("*/*/rank-0"))) == 2
