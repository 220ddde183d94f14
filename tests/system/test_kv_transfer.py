"""Two engine processes over gRPC: blocks from a peer, on one rank and on two, and peers that are killed."""

import os
import signal
import time
from collections.abc import Callable, Sequence

import grpc
import psutil
import pytest

from proa.engine.v1 import core_pb2, service_pb2, service_pb2_grpc
from support.engine_client import generate_request
from support.processes import accepts, engine_process, kill_with_children

PROMPT = [5 + index % 200 for index in range(1000)]
FLAGS = ("--model=builtin", "--kv-cache-memory-bytes=67108864", "--kv-offloading-size=0.2")
TRANSFER = "--kv-transfer-address=127.0.0.1:0"
NUM_CACHED = 992  # all blocks before the last token


class Client:
    """One engine, and how others fetch from it."""

    def __init__(self, address: str) -> None:
        self.stub = service_pb2_grpc.EngineServiceStub(grpc.insecure_channel(address))
        info = self.stub.GetModelInfo(service_pb2.GetModelInfoRequest())
        self.transfer = info.kv_transfer
        self.source = core_pb2.KvSource(
            addresses=[f"127.0.0.1:{port}" for port in info.kv_transfer.ports],
            wait_ms=20_000,  # a peer may still store the blocks of a prompt that it has answered
        )

    @property
    def num_fetching(self) -> int:
        """How many requests wait for blocks."""
        count: int = self.stub.GetLoad(service_pb2.GetLoadRequest()).stats.num_fetching_reqs
        return count

    def ask(self, prompt: Sequence[int], source: core_pb2.KvSource | None = None) -> tuple[list[int], int]:
        """The tokens, and how many of the prompt were cached."""
        message = generate_request(prompt, max_tokens=8, temperature=0.0)
        if source is not None:
            message.request.kv_source.CopyFrom(source)
        outputs = [response.output for response in self.stub.Generate(message, timeout=60)]
        return [token for output in outputs for token in output.new_token_ids], outputs[-1].num_cached_tokens


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_engine_fetches_the_prefix_that_a_peer_has(num_ranks: int) -> None:
    ranks = f"--tensor-parallel-size={num_ranks}"
    with (
        engine_process(*FLAGS, TRANSFER, ranks) as (_, first_address),
        engine_process(*FLAGS, TRANSFER, ranks) as (_, second_address),
    ):
        first, second = Client(first_address), Client(second_address)
        assert first.transfer.fingerprint == second.transfer.fingerprint
        assert len(first.transfer.ports) == num_ranks
        assert first.transfer.block_bytes == second.transfer.block_bytes > 0
        expected, num_cached = first.ask(PROMPT)
        assert num_cached == 0
        assert second.ask(PROMPT, first.source) == (expected, NUM_CACHED)


def test_an_engine_waits_for_the_prompt_that_a_peer_computes_meanwhile() -> None:
    with (
        engine_process(*FLAGS, TRANSFER, "--role=prefill") as (_, first_address),
        engine_process(*FLAGS, TRANSFER, "--role=decode") as (_, second_address),
    ):
        first, second = Client(first_address), Client(second_address)
        message = generate_request(PROMPT, max_tokens=8, temperature=0.0)
        message.request.prefill_only = True
        call = second.stub.Generate(_with_source(PROMPT, first.source), timeout=60)
        (prefilled,) = [response.output for response in first.stub.Generate(message, timeout=60)]
        assert (prefilled.finish_reason, list(prefilled.new_token_ids)) == (core_pb2.FINISH_REASON_STOP, [])
        outputs = [response.output for response in call]
        assert outputs[-1].num_cached_tokens == NUM_CACHED
        assert [token for output in outputs for token in output.new_token_ids] == first.ask(PROMPT)[0]


def test_a_peer_that_is_killed_while_it_is_waited_for_costs_the_wait() -> None:
    with engine_process(*FLAGS, TRANSFER) as (_, address), engine_process(*FLAGS, TRANSFER) as (peer, peer_address):
        engine, source = Client(address), Client(peer_address).source
        source.wait_ms = 60_000
        call = engine.stub.Generate(_with_source(PROMPT, source), timeout=60)
        _wait_until(lambda: engine.num_fetching == 1)  # for blocks that the peer never computes
        began = time.monotonic()
        kill_with_children(peer.pid)
        outputs = [response.output for response in call]
        assert time.monotonic() - began < 20
        assert sum(len(output.new_token_ids) for output in outputs) == 8
        assert outputs[-1].num_cached_tokens == 0


def test_an_engine_whose_mover_hangs_serves_on_and_gets_another() -> None:
    with engine_process(*FLAGS, TRANSFER) as (process, address), engine_process(*FLAGS, TRANSFER) as (_, peer_address):
        engine, peer = Client(address), Client(peer_address)
        expected, _ = peer.ask(PROMPT)
        (mover,) = psutil.Process(process.pid).children()
        os.kill(mover.pid, signal.SIGSTOP)
        assert engine.ask(PROMPT, peer.source) == (expected, 0)
        _wait_until(lambda: mover.pid not in [child.pid for child in psutil.Process(process.pid).children()])
        _wait_until(lambda: accepts(engine.transfer.ports[0]))  # the next mover, on the same port
        prompt = PROMPT[::-1]
        expected, _ = peer.ask(prompt)
        assert engine.ask(prompt, peer.source) == (expected, NUM_CACHED)


def _with_source(prompt: Sequence[int], source: core_pb2.KvSource) -> service_pb2.GenerateRequest:
    message = generate_request(prompt, max_tokens=8, temperature=0.0)
    message.request.kv_source.CopyFrom(source)
    return message


def _wait_until(is_met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.05)
