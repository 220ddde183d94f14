"""`proa-engine serve` as a process with a tiny model: it drains on SIGTERM and fails when a rank is lost."""

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proa.engine.v1 import core_pb2, service_pb2_grpc
from support.engine_client import DEADLINE, SessionClient, generate, generate_request
from support.processes import engine_process

SERVICE = "proa.engine.v1.EngineService"
LONG = 300.0  # seconds; a step hangs after a minute and fifty times what it took in the warm-up, on a busy machine
PROMPT = list(b"proa")
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags to serve random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return (
        "--model",
        str(folder),
        "--load-format",
        "dummy",
        "--num-gpu-blocks-override",
        "64",
        "--max-num-batched-tokens",
        "64",
        "--skip-tokenizer-init",
    )


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[grpc.aio.Channel, service_pb2_grpc.EngineServiceStub]]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel, service_pb2_grpc.EngineServiceStub(channel)


async def test_sigterm_lets_a_running_request_finish(model: tuple[str, ...]) -> None:
    with engine_process(*model, env=ENVIRONMENT) as (child, address):
        async with connected(address) as (_, stub):
            alone = await generate(stub, PROMPT, max_tokens=300, temperature=0)
            session = await SessionClient(stub).open()
            await session.add(1, PROMPT, max_tokens=300, temperature=0)
            while len(session.tokens.get(1, ())) < 3:
                await session.read()
            child.send_signal(signal.SIGTERM)
            while not session.draining:
                await session.read()
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await stub.Generate(generate_request(), timeout=DEADLINE).read()
            while await session.read():
                pass

        assert session.tokens[1] == alone
        assert session.finished[1].finish_reason == core_pb2.FINISH_REASON_LENGTH
        assert await asyncio.to_thread(child.wait, DEADLINE) == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_lost_rank_fails_the_engine_with_its_name(model: tuple[str, ...], number: signal.Signals) -> None:
    flags = (*model, "--tensor-parallel-size", "2", "--step-timeout", "1")
    with engine_process(*flags, env=ENVIRONMENT, seconds=180) as (child, address), only_child(child.pid) as worker:
        async with connected(address) as (channel, stub):
            session = await SessionClient(stub, deadline=LONG).open()
            watching = asyncio.create_task(first_not_serving(channel))
            adding = asyncio.create_task(keep_adding(stub))
            await session.add(1, PROMPT, max_tokens=400)
            while not session.tokens:
                await session.read()
            worker.send_signal(number)
            lost_at = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await session.read_until_finished(0)
            ended_at = time.monotonic()
            not_serving_at = await watching
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
        status = await asyncio.to_thread(child.wait, DEADLINE)

        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not_serving_at <= ended_at
        assert status == 1
        if number is signal.SIGKILL:
            assert f"rank 1 (process {worker.pid}) was killed by signal 9" in (ended.value.details() or "")
            assert ended_at - lost_at < 5
        else:
            assert "one of the ranks 0 to 1 hangs" in (ended.value.details() or "")
        with suppress(psutil.NoSuchProcess):
            worker.wait(DEADLINE)


@contextmanager
def only_child(pid: int) -> Iterator[psutil.Process]:
    """The only child of a process. It is killed at the end, as a stopped process would outlive a failed test."""
    (child,) = psutil.Process(pid).children()
    try:
        yield child
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()


async def first_not_serving(channel: grpc.aio.Channel) -> float:
    """When readiness first changed from SERVING to NOT_SERVING."""
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    was_serving = False
    with suppress(grpc.aio.AioRpcError):
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=LONG):
            is_serving = response.status == health_pb2.HealthCheckResponse.SERVING
            if was_serving and not is_serving:
                return time.monotonic()
            was_serving |= is_serving
    raise AssertionError("the engine left without a word")


async def keep_adding(stub: service_pb2_grpc.EngineServiceStub) -> None:
    """So that there is always a step that needs every rank.

    In a session of its own: a write that meets its stream's end puts a status of grpc's own before the engine's.
    """
    session = await SessionClient(stub, deadline=LONG).open("adding")
    with suppress(asyncio.InvalidStateError):  # the session has ended
        for handle in itertools.count(1):
            await session.add(handle, PROMPT, max_tokens=400)
            await asyncio.sleep(0.05)


def test_unknown_model_directory_is_an_error_without_a_traceback() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "proa_engine",
            "serve",
            "--model",
            "/no/such/folder",
            "--port",
            "0",
            "--metrics-port",
            "0",
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert done.returncode == 1
    assert "proa-engine: error:" in done.stderr
    assert "/no/such/folder does not exist" in done.stderr
    assert "Traceback" not in done.stderr
