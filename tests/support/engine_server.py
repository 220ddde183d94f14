"""The engine's server in this process, with a model or the fake executor."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from proa.engine.v1 import service_pb2_grpc
from proa.tls import TlsFiles
from proa_engine.config import EngineConfig
from proa_engine.core.executor import Executor
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.timing.step_costs import StepCosts
from proa_engine.engine_parts import EngineParts, assemble_engine
from proa_engine.executor.started import StartedRanks
from proa_engine.executor.uniproc import UniProcExecutor
from proa_engine.server.options import ServeOptions
from proa_engine.server.serve import EngineServer
from support.fake_executor import FakeExecutor, FakeModelConfig

CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass
class LoadedFakeExecutor(FakeExecutor):
    """The fake executor with the properties of a loaded one."""

    max_model_len: int = 128
    eos_token_ids: frozenset[int] = frozenset()
    model_config: Any = field(default_factory=lambda: FakeModelConfig())

    step_costs: StepCosts = field(default_factory=StepCosts)
    failure: str | None = None

    max_num_seqs: int = 256
    cross_tokens: int = 0  # of the longest audio that all tokens read; 0: they read none

    @property
    def started(self) -> StartedRanks:
        return StartedRanks(
            description="fake",
            model_config=self.model_config,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            eos_token_ids=self.eos_token_ids,
            cache_groups=CacheGroups(
                num_blocks=self.num_blocks, block_size=self.block_size, cross_tokens=self.cross_tokens
            ),
            step_costs=self.step_costs,
        )

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def make_host_buffer(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))


@dataclass
class RunningServer:
    server: EngineServer
    port: int
    loaded: list[EngineParts]  # empty until the model is loaded
    exits: list[int]  # statuses that the process would have exited with
    result: list[int]  # what run() returned
    thread: threading.Thread

    @property
    def parts(self) -> EngineParts:
        return self.loaded[0]

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=CLIENT_OPTIONS)

    def stub(self, channel: grpc.aio.Channel) -> service_pb2_grpc.EngineServiceStub:
        return service_pb2_grpc.EngineServiceStub(channel)


def wait_for_health(port: int, service: str, *, serving: bool = True, seconds: float = 30.0) -> None:
    """Wait until a service's health is SERVING, or not. Raises `grpc.RpcError` after `seconds`."""
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        for response in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=seconds, wait_for_ready=True):
            if response.status == status:
                return


@contextmanager
def running_server(
    executor: LoadedFakeExecutor | UniProcExecutor | None = None,
    *,
    tokenizer_folder: Path | None = None,
    drain_timeout: float = 30.0,
    step_timeout: float = 5.0,
    before_load: Callable[[], object] = lambda: None,
    wait_until_loaded: bool = True,
    port: int = 0,
    health_port: int = 0,
    tls: TlsFiles | None = None,
    **config: Any,
) -> Iterator[RunningServer]:
    """A server, loaded unless `wait_until_loaded` is false, and stopped at the end if it still runs.

    With `tls`, `health_port` is needed to wait for it.
    """
    executor = executor or LoadedFakeExecutor()
    choices: dict[str, Any] = {
        "block_size": executor.started.cache_groups.block_size,
        "max_num_batched_tokens": 64,
        **config,
    }
    if isinstance(executor, LoadedFakeExecutor):
        executor.max_num_seqs = choices.get("max_num_seqs", executor.max_num_seqs)
    options = ServeOptions(
        config=EngineConfig.from_options(model="fake", **choices),
        host="127.0.0.1",
        port=port,
        metrics_port=0,
        health_port=health_port,
        tls=tls,
        drain_timeout=drain_timeout,
        step_timeout=step_timeout,
    )
    exits: list[int] = []
    result: list[int] = []

    loaded: list[EngineParts] = []

    def load(
        config: EngineConfig, report: Callable[[str], None], trace_steps: Callable[[Executor], Executor]
    ) -> EngineParts:
        before_load()
        loaded.append(assemble_engine(config, executor, tokenizer_folder, trace_steps))
        return loaded[0]

    server = EngineServer(options, load=load, exit_process=exits.append)
    port = server.start()
    thread = threading.Thread(target=lambda: result.append(server.run()), name="engine-main")
    thread.start()
    try:
        if wait_until_loaded:
            wait_for_health(health_port or port, "startup")
        yield RunningServer(server, port, loaded, exits, result, thread)
    finally:
        if thread.is_alive():
            server.request_stop()
        thread.join(30)
        assert not thread.is_alive(), "the server does not stop"


@contextmanager
def serving_model(folder: Path, name: str, **config: Any) -> Iterator[int]:
    """The port of a server that has loaded the model in `folder` on the CPU."""
    chosen = EngineConfig.from_options(model=str(folder), device="cpu", served_model_name=(name,), **config)
    options = ServeOptions(config=chosen, host="127.0.0.1", port=0, metrics_port=0, health_port=0)
    server = EngineServer(options, exit_process=lambda status: None)
    port = server.start()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for_health(port, "startup")
        yield port
    finally:
        server.request_stop()
        thread.join(30)
        assert not thread.is_alive()
