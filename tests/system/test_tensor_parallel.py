"""Tensor parallelism: two ranks give the tokens of one, each holds half, and one rank's end fails the engine."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from proa.contract import SamplingParams
from proa_engine.core.executor import ExecutorFailed
from proa_engine.core.operations import Sleep, SleepLevel, WakeUp
from proa_engine.executor.worker_connection import try_connect
from support.engine import Engine, Result, build_core, request, run
from support.processes import worker_pids
from support.tiny_models import BYTES, make_tiny_model

DEADLINE = 5.0  # seconds to notice a killed rank
START_DEADLINE = 90.0  # a process imports torch, on a loaded machine
MARGIN = 1e-4
CONFIG: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, logprobs=2, key=5, top_p=0.9)
REQUESTS = [
    request(str(index), [(index * 37 + place * 5) % BYTES for place in range(2 + 4 * index)], params)
    for index, params in enumerate([GREEDY, SAMPLED] * 6)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("parallel"), "qwen3", seed=4, max_position_embeddings=128)


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Result]:
    with build_core(folder, **CONFIG) as engine:
        return run(engine, REQUESTS)


@contextmanager
def worker(path: Path, log: TextIO | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process of rank 1, run as in a sidecar. `log` gets its standard error."""
    command = [sys.executable, "-m", "proa_engine", "worker", "--rank", "1", "--tensor-parallel-size", "2"]
    process = subprocess.Popen([*command, "--socket", str(path)], stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def two_ranks(folder: Path, *sockets: Path) -> Any:
    return build_core(folder, tensor_parallel_size=2, worker_sockets=tuple(map(str, sockets)), **CONFIG)


def assert_equal_where_sure(actual: dict[str, Result], expected: dict[str, Result]) -> None:
    """Check tokens up to the first step whose two most likely tokens are within MARGIN; most steps must be checked."""
    num_sure = 0
    for name, reference in expected.items():
        margins = [step.top_logprobs[0] - step.top_logprobs[1] for step in reference.logprobs]
        sure = next((index for index, margin in enumerate(margins) if margin < MARGIN), len(margins))
        assert actual[name].token_ids[:sure] == reference.token_ids[:sure], name
        num_sure += sure
    assert num_sure > 0.9 * sum(len(reference.token_ids) for reference in expected.values())


def connect(path: Path) -> socket.socket:
    """Connect to the worker as the engine does, once it listens."""
    deadline = time.monotonic() + START_DEADLINE
    while (connection := try_connect(path)) is None:
        assert time.monotonic() < deadline, "the worker does not listen"
        time.sleep(0.02)
    return connection


def start_endless(engine: Engine) -> None:
    """Start a request that does not end by itself."""
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    engine.core.submit(request("endless", [1, 2, 3], endless))
    for _ in range(5):
        engine.core.step()


def step_until_it_fails(engine: Engine) -> None:
    while True:
        engine.core.step()


def test_spawned_ranks_give_the_tokens_of_one_and_hold_half_each(folder: Path, single: dict[str, Result]) -> None:
    with build_core(folder, **CONFIG) as alone:
        [whole] = alone.executor.started.rank_sizes
    with two_ranks(folder) as engine:
        assert_equal_where_sure(run(engine, REQUESTS), single)
        first, second = engine.executor.started.rank_sizes
        [pid] = worker_pids()
    assert first.block_bytes == second.block_bytes == whole.block_bytes // 2
    assert first.weight_bytes == second.weight_bytes
    replicated = 2 * first.weight_bytes - whole.weight_bytes  # norms and rotary angles
    assert 0 <= replicated < 0.05 * whole.weight_bytes
    assert not Path(f"/proc/{pid}").exists()


def test_a_sidecar_worker_and_an_engine_connect_again_after_restarts(
    folder: Path, single: dict[str, Result], tmp_path: Path
) -> None:
    path = tmp_path / "rank-1.sock"
    with worker(path) as first, two_ranks(folder, path) as engine:
        assert_equal_where_sure(run(engine, REQUESTS), single)
        start_endless(engine)
        first.kill()
        with pytest.raises(ExecutorFailed, match=r"rank 1 \(.*rank-1.sock\) closed its connection"):
            step_until_it_fails(engine)
    log = tmp_path / "log"
    with log.open("w") as file, worker(path, file) as second:
        with two_ranks(folder, path) as engine:
            assert_equal_where_sure(run(engine, REQUESTS), single)
        assert second.wait(START_DEADLINE) == 0, "the engine shut down"
    messages = [line.partition(" INFO ")[2] for line in log.read_text().splitlines()]
    assert messages == [f"rank 1: listening on {path}", "rank 1: the engine shut down"], "rank 0 logs the progress"


def test_a_killed_worker_fails_the_running_step_and_all_later_ones(folder: Path) -> None:
    with two_ranks(folder) as engine:
        start_endless(engine)
        (worker,) = worker_pids()
        os.kill(worker, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(ExecutorFailed, match=r"rank 1 \(process \d+\) was killed by signal 9"):
            step_until_it_fails(engine)
        assert time.monotonic() - killed < DEADLINE
        assert engine.executor.failure is not None
        with pytest.raises(ExecutorFailed, match="was killed by signal 9"):
            engine.executor.sample_tokens()


def test_the_watchdog_fails_an_engine_whose_worker_is_stopped(folder: Path) -> None:
    with two_ranks(folder) as engine:
        start_endless(engine)
        (worker,) = worker_pids()
        os.kill(worker, signal.SIGSTOP)
        watchdog = threading.Timer(0.5, engine.executor.fail, ["a step has been running for 6 s"])
        watchdog.start()
        with pytest.raises(ExecutorFailed, match="a step has been running for 6 s"):
            step_until_it_fails(engine)
        watchdog.join()


def test_a_worker_exits_when_its_engine_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "rank-1.sock"
    with worker(path) as process:
        engine = connect(path)
        engine.close()
        assert process.wait(START_DEADLINE) == 1


def test_a_rank_that_cannot_start_ends_the_others(folder: Path) -> None:
    too_small = build_core(folder, tensor_parallel_size=2, num_gpu_blocks_override=3, **CONFIG)
    with pytest.raises(ValueError, match="room for 3 blocks"), too_small:
        pass
    assert not worker_pids()


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_sleep_and_wake_up_together(folder: Path, single: dict[str, Result], level: SleepLevel) -> None:
    with two_ranks(folder) as engine:
        for operation in (Sleep(level), WakeUp()):
            done = engine.core.operate(operation)
            while not done.done():
                engine.core.step()
        assert_equal_where_sure(run(engine, REQUESTS), single)
