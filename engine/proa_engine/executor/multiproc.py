"""MultiProcExecutor: rank 0 in this process, ranks 1 … behind Unix sockets: spawned here, or sidecars of the pod.

Every rank gets the same plans and draws the same noise, so all hold the same tokens and nothing is sent back. A rank
that ends fails the executor; one that hangs is for the engine's watchdog, which calls `fail`.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event

from proa_engine.config import EngineConfig
from proa_engine.core.executor import ExecutorFailed
from proa_engine.core.types import SchedulerOutput
from proa_engine.executor.uniproc import UniProcExecutor
from proa_engine.executor.worker_connection import WorkerConnection, spawn
from proa_engine.worker import distributed, wire

# A rank's end breaks rank 0's collective at about the moment it is seen on the socket; its own words say more.
_LOSS_SECONDS = 1.0


class MultiProcExecutor(UniProcExecutor):
    def __init__(self, config: EngineConfig, report: Callable[[str], None]) -> None:
        self._links: list[WorkerConnection] = []
        self._lost = Event()
        self._directory: Path | None = None
        super().__init__(config, report)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        frame = wire.encode(wire.Step(scheduler_output))
        for link in self._links:
            link.send(frame)
        super().execute_model(scheduler_output)

    def fail(self, reason: str) -> None:
        """Also ends the workers that were spawned here: one that is stopped would never see this process leave."""
        super().fail(reason)
        for link in self._links:
            link.kill()

    def shutdown(self) -> None:
        for link in self._links:
            link.close()
        self._links = []
        super().shutdown()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _bring_up(self, config: EngineConfig) -> None:
        """All ranks load at once; the rank with the least room decides the number of blocks for all."""
        self._links = self._make_links(config)
        for link in self._links:
            try:
                link.connect(self._report)
            except ConnectionError as error:
                raise ExecutorFailed(str(error)) from error
        world_size = config.tensor_parallel_size
        store = distributed.open_store(world_size)
        rendezvous = distributed.Rendezvous(time.time_ns(), store.port, 0, world_size)
        self._tell(wire.Init(config, rendezvous.generation, rendezvous.port))
        self._local.call(lambda: self._worker.init_device(rendezvous, store))
        sizes = [self._local.call(self._worker.load_model)]
        for link in self._links:
            ready = self._local.wait_for(link.ready)
            assert ready.generation == rendezvous.generation
            sizes.append(ready.sizes)
        self._tell(wire.Start(min(size.num_blocks for size in sizes)))
        self._start(sizes)
        for link in self._links:
            self._local.wait_for(link.started)

    def _make_links(self, config: EngineConfig) -> list[WorkerConnection]:
        if config.worker_sockets:
            return [
                WorkerConnection(rank, Path(path), None, self._on_lost)
                for rank, path in enumerate(config.worker_sockets, start=1)
            ]
        self._directory = Path(tempfile.mkdtemp(prefix="proa-"))
        links = []
        for rank in range(1, config.tensor_parallel_size):
            path = self._directory / f"rank-{rank}.sock"
            # On the device thread, which lives as long as the executor: who asked for the executor may not.
            process = self._local.call(partial(spawn, rank, config.tensor_parallel_size, path))
            links.append(WorkerConnection(rank, path, process, self._on_lost))
        return links

    def _tell(self, message: wire.ToWorker) -> None:
        frame = wire.encode(message)
        for link in self._links:
            link.send(frame)

    def _on_lost(self, reason: str) -> None:
        self._lost.set()
        self.fail(reason)

    def _explain(self, error: BaseException) -> str:
        """An error of rank 0's step. Where it is another rank's doing, that rank's loss has been told meanwhile."""
        self._lost.wait(_LOSS_SECONDS)
        return super()._explain(error)
