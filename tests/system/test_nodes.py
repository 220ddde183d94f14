"""One engine over several nodes: processes on this machine that meet at a TCP port of the loopback interface."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from proa.engine.v1 import service_pb2_grpc
from proa_engine.config import EngineConfig, PeerTls
from proa_engine.executor.remote_ranks import RemoteRanks
from support.certificates import Certificate, signed
from support.engine import Result, build_core
from support.engine_client import SessionClient, generate
from support.parallel_equality import CONFIG, PROMPTS, assert_equal_where_sure
from support.parallel_equality import generate as generate_all
from support.processes import engine_process, free_port
from support.tiny_models import make_tiny_model

DEADLINE = 90.0  # a process imports torch, on a loaded machine
LOST_SECONDS = 60.0  # to notice a killed node, on a loaded machine
ENDLESS = 4000  # tokens, more than are sampled until a node is killed
PROMPT = list(b"proa")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("nodes"), "qwen3", seed=4, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return signed(tmp_path_factory.mktemp("certificates") / "ours")


class Node:
    """The process of a node other than 0, started after `delay` seconds, and what it prints."""

    def __init__(self, command: list[str], log: Path, delay: float) -> None:
        self._log = log
        with log.open("wb") as output:
            late = ["sh", "-c", 'sleep "$0"; exec "$@"', str(delay), *command]
            self.process = subprocess.Popen(late, stdout=output, stderr=subprocess.STDOUT)

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        return self.process.wait(DEADLINE)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while text not in self.printed:
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.05)


@contextmanager
def node(
    folder: Path, port: int, tmp_path: Path, *flags: str, num_ranks: int = 2, delay: float = 0.0
) -> Iterator[Node]:
    """Node 1 of two."""
    command = [sys.executable, "-m", "proa_engine", "serve", "--model", str(folder), "--nnodes=2", "--node-rank=1"]
    command += [f"--tensor-parallel-size={num_ranks}", "--master-addr=127.0.0.1", f"--master-port={port}", *flags]
    node = Node(command, tmp_path / f"node-{time.monotonic_ns()}.log", delay)
    try:
        yield node
    finally:
        node.process.kill()  # the kernel then kills its ranks
        node.process.wait()


def nodes_of(port: int) -> dict[str, Any]:
    """Fields of node 0's configuration."""
    nodes = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}
    return nodes | CONFIG


def files_of(made: Certificate) -> tuple[PeerTls, list[str]]:
    """A certificate for node 0's configuration, and as flags."""
    files = [str(made.certificate), str(made.key), str(made.authority)]
    return PeerTls(*files), [f"--tls-{name}={file}" for name, file in zip(("cert", "key", "ca"), files, strict=True)]


@contextmanager
def served(folder: Path, port: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Node 0 as a process, once it has loaded, and its address."""
    flags = ["--model", str(folder), "--tensor-parallel-size=2", "--nnodes=2", "--master-addr=127.0.0.1"]
    flags += [f"--master-port={port}", "--num-gpu-blocks-override=256", "--skip-tokenizer-init", "--max-model-len=4096"]
    with engine_process(*flags, env={"OMP_NUM_THREADS": "1"}) as child:
        yield child


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Result]:
    with build_core(folder, **CONFIG) as engine:
        return generate_all(engine, "one", PROMPTS)


def test_two_nodes_give_the_tokens_of_one_process(folder: Path, tmp_path: Path, expected: list[Result]) -> None:
    port = free_port()
    with node(folder, port, tmp_path) as other:
        other.wait_for("waiting for node 0 at 127.0.0.1")
        with build_core(folder, **nodes_of(port), kv_offloading_size=0.01) as engine:
            assert_equal_where_sure(generate_all(engine, "two", PROMPTS), expected)
            assert engine.executor.started.host_tier is not None
        assert other.wait() == 0, other.printed


def test_two_nodes_with_a_pipeline_stage_each_meet_over_tls_when_node_0_starts_long_before(
    folder: Path, made: Certificate, tmp_path: Path, expected: list[Result]
) -> None:
    port = free_port()
    tls, flags = files_of(made)
    with node(folder, port, tmp_path, *flags, "--pipeline-parallel-size=2", delay=3.0) as other:
        with build_core(folder, **nodes_of(port), pipeline_parallel_size=2, peer_tls=tls) as engine:
            assert len(engine.executor.started.rank_sizes) == 4
            assert_equal_where_sure(generate_all(engine, "four", PROMPTS), expected)
        assert other.wait() == 0, other.printed


async def test_a_killed_node_ends_the_engine_with_the_name_of_its_rank(folder: Path, tmp_path: Path) -> None:
    port = free_port()
    with node(folder, port, tmp_path) as other, served(folder, port) as (child, address):
        async with grpc.aio.insecure_channel(address) as channel:
            session = await SessionClient(service_pb2_grpc.EngineServiceStub(channel), deadline=DEADLINE).open()
            for handle in range(1, 5):
                await session.add(handle, PROMPT, max_tokens=ENDLESS, ignore_eos=True)
            while len(session.tokens) < 4:
                await session.read()
            other.process.kill()
            killed_at = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await session.read_until_finished(*range(1, 5))

        assert time.monotonic() - killed_at < LOST_SECONDS
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "rank 1 (node 1 at 127.0.0.1) closed its connection" in (ended.value.details() or "")
        assert await asyncio.to_thread(child.wait, DEADLINE) == 1


async def test_sigterm_to_all_nodes_lets_requests_finish_and_both_end_normally(folder: Path, tmp_path: Path) -> None:
    port = free_port()
    with node(folder, port, tmp_path) as other, served(folder, port) as (child, address):
        async with grpc.aio.insecure_channel(address) as channel:
            stub = service_pb2_grpc.EngineServiceStub(channel)
            alone = await generate(stub, PROMPT, max_tokens=150, temperature=0, ignore_eos=True)
            session = await SessionClient(stub, deadline=DEADLINE).open()
            await session.add(1, PROMPT, max_tokens=150, temperature=0, ignore_eos=True)
            while len(session.tokens.get(1, ())) < 3:
                await session.read()
            other.process.send_signal(signal.SIGTERM)  # as Kubernetes signals all pods of a group
            child.send_signal(signal.SIGTERM)
            while await session.read():
                pass

        assert session.tokens[1] == alone
        assert await asyncio.to_thread(child.wait, DEADLINE) == 0
        assert await asyncio.to_thread(other.wait) == 0, other.printed


def test_nodes_that_do_not_belong_to_the_engine_end_with_the_reason_and_a_member_at_the_second_sigterm(
    folder: Path, made: Certificate, tmp_path: Path
) -> None:
    tls, flags = files_of(made)
    _, foreign = files_of(signed(tmp_path / "theirs"))
    config = EngineConfig.from_options(model=str(folder), **nodes_of(free_port()), peer_tls=tls)
    with (
        closing(RemoteRanks(config, print)) as ranks,
        node(folder, config.parallel.master_port, tmp_path, *flags) as member,
    ):
        member.wait_for("connected to node 0")
        for arguments, num_ranks, reason in (
            (flags, 4, "num_ranks is 4 on its node and 2 on node 0"),
            (flags, 2, "rank 1 is connected already, from 127.0.0.1"),
            (foreign, 2, "no TLS connection to node 0"),
            ([], 2, "node 0 demands TLS"),
        ):
            with node(folder, config.parallel.master_port, tmp_path, *arguments, num_ranks=num_ranks) as stranger:
                assert stranger.wait() == 1
                assert reason in stranger.printed
        accepted = ranks.take(1)
        assert accepted is not None, "the strangers did no harm to the member"
        member.process.send_signal(signal.SIGTERM)
        member.wait_for("SIGTERM again ends them now")
        assert member.process.poll() is None
        member.process.send_signal(signal.SIGTERM)
        assert member.wait() == 128 + signal.SIGTERM
        accepted.close()


def test_a_node_that_waits_for_node_0_ends_at_sigterm(folder: Path, tmp_path: Path) -> None:
    with node(folder, free_port(), tmp_path) as waiting:
        waiting.wait_for("waiting for node 0")
        waiting.process.send_signal(signal.SIGTERM)
        assert waiting.wait() == 0
