"""A client's disconnect frees the KV cache of a real engine, over HTTP and through the gateway."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proa_engine.config import EngineConfig
from proa_engine.core.types import SchedulerOutput
from proa_engine.executor.uniproc import UniProcExecutor
from support.engine_client import DEADLINE
from support.engine_server import RunningServer, running_server
from support.gateway import running_gateway, until
from support.tiny_models import make_tiny_model


class GatedExecutor(UniProcExecutor):
    """Starts one step for each permit once it is loaded, so that no step runs before the disconnect arrives."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(model=str(model), device="cpu", num_gpu_blocks_override=64, max_num_batched_tokens=64)
        self._permits: threading.Semaphore | None = None
        super().__init__(config, lambda text: None)
        self.num_steps = 0
        self._permits = threading.Semaphore(0)

    def open(self, num_steps: int) -> None:
        assert self._permits is not None
        self._permits.release(num_steps)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        if self._permits is not None:
            assert self._permits.acquire(timeout=DEADLINE), "the test let no more steps pass"
            self.num_steps += 1
        super().execute_model(scheduler_output)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def gated_engine(model: Path) -> Iterator[tuple[RunningServer, GatedExecutor]]:
    executor = GatedExecutor(model)
    with running_server(executor, tokenizer_folder=model, step_timeout=DEADLINE) as server:
        try:
            yield server, executor
        finally:
            executor.open(1000)


class Aborts:
    """Records the aborts that reach the core."""

    def __init__(self, server: RunningServer) -> None:
        core = server.parts.core
        self.request_ids: list[str] = []
        self._abort = core.abort
        core.abort = self._on_abort  # type: ignore[method-assign]

    def _on_abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        self._abort(request_ids)
        self.request_ids += request_ids


@pytest.mark.parametrize("stream", [True, False])
async def test_memory_is_free_again_within_two_steps_of_a_clients_disconnect(model: Path, stream: bool) -> None:
    with gated_engine(model) as (server, executor):
        core, aborts = server.parts.core, Aborts(server)
        async with running_gateway(f"127.0.0.1:{server.port}") as gateway:
            base = core.stats().kv_cache_usage
            client = asyncio.create_task(gateway.chat(stream=stream, max_tokens=300, ignore_eos=True))
            executor.open(6)
            await until(lambda: executor.num_steps == 6)
            assert core.stats().num_running_reqs == 1
            assert core.stats().kv_cache_usage > base

            client.cancel()
            await until(lambda: len(aborts.request_ids) == 1)
            executor.open(2)
            await until(lambda: core.stats().kv_cache_usage == base)

            assert executor.num_steps <= 8
            assert core.stats().num_running_reqs == 0
