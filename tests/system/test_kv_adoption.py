"""Engine processes that are killed and started again on the host memory that they have left."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import psutil
import pytest

from proa.engine.v1 import service_pb2, service_pb2_grpc
from support.engine_client import generate_request
from support.processes import engine_process

PROMPT = [5 + index % 200 for index in range(1000)]
NUM_CACHED = 992  # all blocks before the last token
FLAGS = ("--model=builtin", "--kv-cache-memory-bytes=67108864", "--kv-offloading-size=0.2")


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def ask(address: str, prompt: Sequence[int] = PROMPT) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were cached."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.EngineServiceStub(channel)
        message = generate_request(prompt, max_tokens=8, temperature=0.0)
        outputs = [response.output for response in stub.Generate(message, timeout=60)]
    return [token for output in outputs for token in output.new_token_ids], outputs[-1].num_cached_tokens


def ask_until_adopted(address: str) -> tuple[list[int], int]:
    """Ask when the engine has reported that it adopted the prompt's blocks."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.EngineServiceStub(channel)
        for response in stub.SubscribeKvEvents(service_pb2.SubscribeKvEventsRequest(), timeout=60):
            if len(response.host_stored) >= NUM_CACHED:  # 16 bytes for each block of 16 tokens
                break
    return ask(address)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_that_was_killed_continues_with_its_blocks(num_ranks: int, folder: Path) -> None:
    flags = (*FLAGS, f"--tensor-parallel-size={num_ranks}", f"--kv-offloading-path={folder}")
    with engine_process(*flags) as (process, address):
        expected, num_cached = ask(address)
        assert num_cached == 0
        time.sleep(0.5)  # its blocks are stored
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert len(list(folder.glob("rank-*.arena"))) == num_ranks
    with engine_process(*flags) as (_, address):
        assert ask_until_adopted(address) == (expected, NUM_CACHED)


def test_an_engine_and_its_mover_that_were_killed_in_mid_store_leave_nothing_wrong(folder: Path) -> None:
    """Several kills at random times, under load. Whatever is adopted gives the tokens that are computed without."""
    prompts = [[5 + (index * step) % 200 for index in range(1000)] for step in (1, 3, 7, 9)]
    with engine_process(*FLAGS) as (_, address):
        expected = [ask(address, prompt)[0] for prompt in prompts]
    flags = (*FLAGS, f"--kv-offloading-path={folder}")
    for delay in (0.05, 0.2):
        with engine_process(*flags) as (process, address), grpc.insecure_channel(address) as channel:
            stub = service_pb2_grpc.EngineServiceStub(channel)
            calls = [stub.Generate(generate_request(prompt, max_tokens=8), timeout=60) for prompt in prompts]
            time.sleep(delay)
            everything = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            for pid in everything:
                os.kill(pid, signal.SIGKILL)
            process.wait()
            for call in calls:
                call.cancel()
    with engine_process(*flags) as (_, address):
        time.sleep(1.0)
        assert [ask(address, prompt)[0] for prompt in prompts] == expected


def test_a_second_engine_on_the_folder_ends_with_a_sentence(folder: Path) -> None:
    flags = (*FLAGS, f"--kv-offloading-path={folder}")
    sentence = "error: kv_offloading_path: .*rank-0.arena is in use by another engine: give each engine a folder of its"
    with engine_process(*flags), pytest.raises(AssertionError, match=sentence), engine_process(*flags):
        pass
