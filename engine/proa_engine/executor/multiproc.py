"""MultiProcExecutor: rank 0 in this process, the others in worker processes: spawned here, sidecars of the pod, or on
other nodes.

Every rank gets the same scheduler outputs and draws the same sampling noise, so all hold the same tokens and no results
are sent back. Masks of grammars stay in this process: rank 0 broadcasts the tokens of steps with constrained rows.
A rank whose process ends fails the executor; for one that hangs, the engine's watchdog calls `fail`.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

from proa.logs import LogOptions
from proa_engine.config import EngineConfig
from proa_engine.core.executor import ExecutorFailed, StepFuture
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.lora_store import LoraInvalid
from proa_engine.core.types import SchedulerOutput
from proa_engine.executor.deferred_sampling import DeferredSampling
from proa_engine.executor.remote_ranks import RemoteRanks
from proa_engine.executor.started import StartedRanks
from proa_engine.executor.uniproc import UniProcExecutor
from proa_engine.executor.worker_connection import (
    Endpoint,
    NodeEndpoint,
    SpawnedEndpoint,
    UnixEndpoint,
    WorkerConnection,
    wait_for_worker,
)
from proa_engine.framing import encode
from proa_engine.memory.kv_cache import check_ranks, smallest
from proa_engine.mover.messages import FromCore
from proa_engine.ranks import distributed, wire
from proa_engine.ranks.spawn import spawn
from proa_engine.step.media import for_rank
from proa_engine.step.step_inputs import StepInputs
from proa_engine.worker.compile_pool import CompilePool, start_compile_pool

T = TypeVar("T")

# If a rank is lost, rank 0's collective fails and its connection ends at about the same time. The connection knows why.
_LOSS_SECONDS = 1.0


class MultiProcExecutor(UniProcExecutor):
    def __init__(
        self, config: EngineConfig, log: Callable[[str], None], compile_pool: CompilePool | None = None
    ) -> None:
        self._endpoints: Sequence[Endpoint] = ()  # of ranks 1 and up
        self._connections: list[WorkerConnection] = []  # of those that are connected, by rank
        self._lost = Event()
        self._at_exit = ExitStack()
        self._remote_ranks: RemoteRanks | None = None
        self._is_started = False
        self._deferred = DeferredSampling(config.parallel.pipeline_parallel_size)
        self._stage_size = config.parallel.tensor_parallel_size  # ranks
        super().__init__(config, log, compile_pool)
        self._is_started = True

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._deferred.remove({*scheduler_output.finished_request_ids, *scheduler_output.preempted_request_ids})
        if scheduler_output.encoder_inputs or scheduler_output.cross_inputs:
            # Each rank of the first stage encodes some of them.
            for rank, connection in enumerate(self._connections, start=1):
                connection.send(encode(wire.Step(for_rank(scheduler_output, rank, self._stage_size))))
        else:
            self._broadcast(wire.Step(scheduler_output))
        super().execute_model(scheduler_output)

    def _start_sampling(self, inputs: StepInputs, masks: GrammarMasks | None) -> StepFuture:
        return self._deferred.add(inputs.request_ids, lambda: self._sample_on_stage(inputs, masks))

    def _sample_on_stage(self, inputs: StepInputs, masks: GrammarMasks | None) -> StepFuture:
        """Sample on all ranks of the first pipeline stage. Those of a model's only stage do so after each step."""
        if self._worker.model_config.stage.count > 1:
            for connection in self._connections[: self._stage_size - 1]:
                connection.send(encode(wire.Sample()))
        return super()._start_sampling(inputs, masks)

    def sleep(self, level: int) -> None:
        """Put all ranks to sleep at the same time."""
        self._on_all_ranks(wire.Sleep(level), lambda: UniProcExecutor.sleep(self, level))

    def wake_up(self) -> None:
        self._on_all_ranks(wire.WakeUp(), lambda: UniProcExecutor.wake_up(self))

    def load_lora(self, lora_id: int, path: str) -> "Future[str]":
        """Read the adapter on all ranks at the same time, each from its own file system."""
        answers = [connection.load_lora(lora_id, path) for connection in self._connections]
        return self._read_lora(lora_id, path, lambda: self._load_with_other_ranks(lora_id, path, answers))

    def unload_lora(self, lora_id: int) -> None:
        self._broadcast(wire.UnloadLora(lora_id))
        super().unload_lora(lora_id)

    def fail(self, reason: str) -> None:
        """Also kill spawned workers: one that is stopped by SIGSTOP would not notice that this process ends."""
        super().fail(reason)
        for endpoint in self._endpoints:
            endpoint.kill()

    def shutdown(self) -> None:
        has_failed = not self._is_started or self._failure.has_happened
        for connection in self._connections:
            connection.request_exit(has_failed=has_failed)
        for endpoint in self._endpoints[len(self._connections) :]:
            endpoint.join(0)
        for connection in self._connections:
            connection.close()
        self._endpoints, self._connections = (), []
        self._at_exit.close()
        super().shutdown()

    def _start(self) -> StartedRanks:
        """Load all ranks at the same time."""
        config = self._config
        self._endpoints = self._make_endpoints(config)
        self._connect()
        host = self._remote_ranks.local_address if self._remote_ranks else distributed.LOOPBACK
        store = distributed.open_store(host, config.parallel.num_ranks)
        rendezvous = distributed.Rendezvous(time.time_ns(), host, store.port, 0, config.parallel.num_ranks)
        self._broadcast(wire.Init(config, rendezvous.generation, host, rendezvous.port))
        compile_pool = self._call(lambda: start_compile_pool(config, 0, self._compile_pool))
        self._call(lambda: self._worker.init_device(rendezvous, store))
        sizes = [self._call(lambda: self._worker.load_model(compile_pool))]
        for connection in self._connections:
            ready = self._failure.wait_for(connection.ready)
            assert ready.generation == rendezvous.generation
            sizes.append(ready.sizes)
        check_ranks(config, sizes)
        disk_folder = self._call(self._worker.take_disk_folder)
        self._broadcast(wire.Start(smallest(size.cache for size in sizes), disk_folder))
        rank = self._start_worker(sizes, disk_folder)
        others = [self._failure.wait_for(connection.started).mover_port for connection in self._connections]
        return self._merge_ranks(rank, sizes, [rank.mover_port, *others])

    def _call(self, job: Callable[[], T]) -> T:
        """All ranks refuse a configuration at about the same time. Raise rank 0's `ValueError` then, whichever is
        first."""
        own = self._device_thread.submit(job)
        try:
            return self._failure.wait_for(own)
        except ExecutorFailed:
            wait((own,), _LOSS_SECONDS)
            if own.done() and isinstance(error := own.exception(), ValueError):
                raise error from None
            raise

    def _on_all_ranks(self, message: wire.Sleep | wire.WakeUp, on_rank_0: Callable[[], None]) -> None:
        """Send `message` to the other ranks, call `on_rank_0` meanwhile, as both may join in collectives, and wait for
        all."""
        answers = [connection.call(message) for connection in self._connections]
        on_rank_0()
        for answer in answers:
            self._failure.wait_for(answer)

    def _load_with_other_ranks(self, lora_id: int, path: str, answers: "list[Future[str]]") -> str:
        """Read rank 0's part of the adapter and wait for the other ranks. If one fails, none keeps the adapter."""
        digests, errors = set[str](), list[Exception]()
        for digest in (
            partial(self._worker.weights.load_lora, lora_id, path),
            *(partial(self._failure.wait_for, a) for a in answers),
        ):
            try:
                digests.add(digest())
            except Exception as error:  # wait for the other ranks nevertheless: they read one adapter at a time
                errors.append(error)
        if not errors and len(digests) > 1:
            errors.append(LoraInvalid(f"the ranks have different adapters at {path}"))
        if errors:
            self.unload_lora(lora_id)
            raise errors[0]
        return digests.pop()

    def _make_endpoints(self, config: EngineConfig) -> Sequence[Endpoint]:
        """Return the endpoints of all ranks but rank 0, and start those of this machine."""
        if config.parallel.worker_sockets:
            return [UnixEndpoint(Path(path)) for path in config.parallel.worker_sockets]
        if config.parallel.nnodes == 1:
            return self._spawn_workers(config)
        ranks = self._remote_ranks = RemoteRanks(config, self._log)  # before any process, as its port may be in use
        self._at_exit.callback(ranks.close)
        others = range(config.parallel.ranks_per_node, config.parallel.num_ranks)
        return [*self._spawn_workers(config), *(NodeEndpoint(ranks, rank) for rank in others)]

    def _spawn_workers(self, config: EngineConfig) -> list[Endpoint]:
        """Start the ranks of this machine, but rank 0."""
        directory = Path(tempfile.mkdtemp(prefix="proa-"))
        self._at_exit.callback(shutil.rmtree, directory, ignore_errors=True)
        endpoints: list[Endpoint] = []
        for rank in range(1, config.parallel.ranks_per_node):
            path = directory / f"rank-{rank}.sock"
            command = ["worker", "--rank", str(rank), "--socket", str(path)]
            command += ["--tensor-parallel-size", str(config.parallel.tensor_parallel_size)]
            command += ["--pipeline-parallel-size", str(config.parallel.pipeline_parallel_size)]
            command += LogOptions.from_environment().arguments()
            # A worker is killed when the thread that spawned it ends. The device thread lives as long as the executor.
            process = self._call(partial(spawn, *command, ranks_here=config.parallel.ranks_here))
            endpoints.append(SpawnedEndpoint(path, process))
        return endpoints

    def _connect(self) -> None:
        """Connect to the other ranks' workers, which start at the same time."""
        for rank, endpoint in enumerate(self._endpoints, start=1):
            try:
                stream = wait_for_worker(rank, endpoint, self._log, self._failure.check)
            except ConnectionError as error:
                raise ExecutorFailed(str(error)) from error
            self._connections.append(WorkerConnection(rank, endpoint, stream, self._on_lost, self._movers.take))

    def _broadcast(self, message: wire.ToWorker) -> None:
        frame = encode(message)
        for connection in self._connections:
            connection.send(frame)

    def _send_to_movers(self, message: FromCore) -> None:
        self._broadcast(wire.ToMover(message))
        super()._send_to_movers(message)

    def _on_lost(self, reason: str) -> None:
        self._lost.set()
        self.fail(reason)

    def _explain(self, error: BaseException) -> str:
        """Return why a step of rank 0 failed. If another rank's loss caused it, that is the reason given to `fail`."""
        self._lost.wait(_LOSS_SECONDS)
        return super()._explain(error)
