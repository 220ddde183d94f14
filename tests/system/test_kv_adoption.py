"""Engine processes that are killed and started again on the host memory that they have left."""

import mmap
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
from safetensors.torch import load_file, save_file

from proa.engine.v1 import service_pb2, service_pb2_grpc
from proa_engine.builtin import builtin_model_folder
from support.engine_client import generate_request
from support.processes import engine_process, kill_with_children

PROMPT = [5 + index % 200 for index in range(1000)]
NUM_CACHED = 992  # all blocks before the last token
HASH_BYTES = 16
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


def wait_for_host_blocks(address: str, is_met: Callable[[Set[bytes], Set[bytes]], bool]) -> Set[bytes]:
    """Follow the blocks on the device and in host memory until they meet a condition. Returns the hashes of those in
    host memory."""
    device, host = set[bytes](), set[bytes]()
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.EngineServiceStub(channel)
        for events in stub.SubscribeKvEvents(service_pb2.SubscribeKvEventsRequest(), timeout=60):
            device = (set() if events.snapshot else device - hashes(events.removed)) | hashes(events.stored)
            host = (set() if events.host_snapshot else host - hashes(events.host_removed)) | hashes(events.host_stored)
            if is_met(device, host):
                return host
    raise AssertionError("the engine ended the subscription")


def wait_until_stored(address: str) -> Set[bytes]:
    """Wait until host memory has all blocks of the device."""
    return wait_for_host_blocks(address, lambda device, host: bool(device) and device <= host)


def wait_until_settled(folder: Path, blocks: Set[bytes], num_ranks: int) -> None:
    """Wait until each rank's file names the blocks. The event of a block comes before its copy, which ends later on
    some ranks than on others."""
    paths = sorted(folder.glob("rank-*.arena"))
    assert len(paths) == num_ranks
    deadline = time.monotonic() + 60
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            directory = len(content) - (1 << 20)  # it is at the end, and smaller
            while not all(content.find(block, directory) >= 0 for block in blocks):
                assert time.monotonic() < deadline, f"{path.name} does not name all blocks"
                time.sleep(0.05)


def hashes(joined: bytes) -> Set[bytes]:
    return {joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_that_was_killed_continues_with_its_blocks(num_ranks: int, folder: Path) -> None:
    flags = (*FLAGS, f"--tensor-parallel-size={num_ranks}", f"--kv-offloading-path={folder}")
    with engine_process(*flags) as (process, address):
        expected, num_cached = ask(address)
        assert num_cached == 0
        stored = wait_until_stored(address)
        assert len(stored) * 16 == NUM_CACHED
        wait_until_settled(folder, stored, num_ranks)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with engine_process(*flags) as (_, address):
        wait_for_host_blocks(address, lambda _, host: stored <= host)
        assert ask(address) == (expected, NUM_CACHED)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_with_other_weights_at_the_same_path_adopts_nothing(
    num_ranks: int, folder: Path, tmp_path: Path
) -> None:
    """Two rows of the embedding differ, which of two ranks only the last one has."""
    model = shutil.copytree(builtin_model_folder(), tmp_path / "model")
    flags = (*FLAGS, f"--model={model}", f"--tensor-parallel-size={num_ranks}", f"--kv-offloading-path={folder}")
    with engine_process(*flags) as (process, address):
        ask(address)
        wait_until_settled(folder, wait_until_stored(address), num_ranks)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][[-3, -2]] *= 2
    save_file(tensors, path)
    with engine_process(*flags) as (_, address):
        _, num_cached = ask(address)
        assert num_cached == 0


def test_an_engine_and_its_mover_that_were_killed_in_mid_store_leave_nothing_wrong(folder: Path) -> None:
    """Several kills at random times, under load. Whatever is adopted gives the tokens that are computed without."""
    *prompts, other = ([5 + (index * step) % 200 for index in range(1000)] for step in (1, 3, 7, 9, 11))
    with engine_process(*FLAGS) as (_, address):
        expected = [ask(address, prompt)[0] for prompt in prompts]
    flags = (*FLAGS, f"--kv-offloading-path={folder}")
    for delay in (0.05, 0.2):
        with engine_process(*flags) as (process, address), grpc.insecure_channel(address) as channel:
            stub = service_pb2_grpc.EngineServiceStub(channel)
            calls = [stub.Generate(generate_request(prompt, max_tokens=8), timeout=60) for prompt in prompts]
            time.sleep(delay)
            kill_with_children(process.pid)
            process.wait()
            for call in calls:
                call.cancel()
    with engine_process(*flags) as (_, address):
        ask(address, other)
        wait_until_stored(address)  # so the pages that had blocks are adopted
        assert [ask(address, prompt)[0] for prompt in prompts] == expected


def test_a_second_engine_on_the_folder_ends_with_a_sentence(folder: Path) -> None:
    flags = (*FLAGS, f"--kv-offloading-path={folder}")
    sentence = "error: kv_offloading_path: .*rank-0.arena is in use by another engine: give each engine a folder of its"
    with engine_process(*flags), pytest.raises(AssertionError, match=sentence), engine_process(*flags):
        pass
