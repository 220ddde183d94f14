"""RankServer: runs one rank's worker as the messages of the engine demand.

A reader thread detects the end of the engine at once and exits the process: the main thread may be in a collective that
no other rank will join.
"""

import logging
import os
import time
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NoReturn

import msgspec

from proa_engine.core.lora_store import LoraError, LoraNotFound
from proa_engine.core.types import SchedulerOutput
from proa_engine.framing import Stream, encode
from proa_engine.memory.rank_tiers import NoRankTiers, RankTiers
from proa_engine.ranks import wire
from proa_engine.ranks.distributed import Rendezvous
from proa_engine.step.device_thread import run_beside_steps
from proa_engine.worker.compile_pool import start_compile_pool, use_compile_cache
from proa_engine.worker.worker import Worker

_FAILED = 1  # exit code: the engine or this rank failed
_EXIT_SECONDS = 5.0  # from Shutdown until the process exits, whatever the main thread does
_log = logging.getLogger(__name__)


class RankServer:
    def __init__(self, connection: Stream, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._inbox: SimpleQueue[wire.ToWorker] = SimpleQueue()
        self._is_started = False
        self._samples_each_step = True  # False with pipeline stages: the first one's ranks are sent Sample
        self._sending = Lock()
        self._tiers: RankTiers = NoRankTiers()

    def serve(self) -> int:
        """Run steps until Shutdown. Returns the exit code. If the engine is lost, the process exits instead."""
        Thread(target=self._read, name="proa-engine", daemon=True).start()
        try:
            worker = self._start()
            self._run_steps(worker)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        _log.info("the engine shut down")
        worker.shutdown()
        return 0

    def _start(self) -> Worker:
        init = self._inbox.get()
        assert isinstance(init, wire.Init)
        config = init.config
        self._samples_each_step = config.parallel.pipeline_parallel_size == 1
        # rank 0 logs the progress of all
        worker = Worker(config, self._rank, _log.debug, ranks_here=config.parallel.ranks_here)
        use_compile_cache(config)
        compile_pool = start_compile_pool(config, self._rank)
        worker.init_device(Rendezvous(init.generation, init.host, init.port, self._rank, config.parallel.num_ranks))
        self._send(wire.Ready(init.generation, worker.load_model(compile_pool)))
        start = self._inbox.get()
        assert isinstance(start, wire.Start)
        started = worker.start(start.sizes, start.disk_folder, lambda message: self._send(wire.FromMover(message)))
        self._tiers = worker.tiers
        self._send(wire.Started(started.mover_port))
        self._is_started = True
        return worker

    def _run_steps(self, worker: Worker) -> None:
        while not isinstance(message := self._inbox.get(), wire.Shutdown):
            match message:
                case wire.Step():
                    self._run_step(worker, message.scheduler_output)
                case wire.Sample():
                    worker.model_runner.sample_tokens()
                case wire.Sleep():
                    worker.sleep(message.level)
                    self._send(wire.Done())
                case wire.WakeUp():
                    worker.wake_up()
                    self._send(wire.Done())
                case wire.LoadLora():
                    run_beside_steps(partial(self._load_lora, worker, message), "proa-lora")
                case wire.UnloadLora():
                    worker.weights.unload_lora(message.lora_id)
                case _:
                    raise AssertionError(message)

    def _run_step(self, worker: Worker, scheduler_output: SchedulerOutput) -> None:
        runner = worker.model_runner
        inputs = runner.prepare_inputs(scheduler_output)
        worker.tiers.begin_step(scheduler_output.copies, runner.memory)
        if inputs is not None:
            runner.execute_model(inputs)
            if self._samples_each_step:
                runner.sample_tokens()

    def _load_lora(self, worker: Worker, message: wire.LoadLora) -> None:
        """Read an adapter and send the result to the engine. An error does not end the rank, which can run steps
        without the adapter."""
        lora_id = message.lora_id
        try:
            answer = wire.LoraRead(lora_id, worker.weights.load_lora(lora_id, message.path))
        except LoraError as error:
            answer = wire.LoraRead(lora_id, error=str(error), is_missing=isinstance(error, LoraNotFound))
        except Exception as error:
            answer = wire.LoraRead(lora_id, error=f"rank {self._rank}: {type(error).__name__}: {error}")
        self._send(answer)

    def _read(self) -> None:
        try:
            self._read_messages()
            _log.error("the engine closed its connection")
        except OSError as error:
            _log.error("lost the connection to the engine: %s", error)
        except msgspec.MsgspecError as error:
            _log.error("the engine sent what is no message: %s", error)
        os._exit(_FAILED)

    def _read_messages(self) -> None:
        """Pass messages on until the end of the connection. Exits after Shutdown."""
        reader = wire.worker_reader(self._connection)
        while (message := reader.read()) is not None:
            if isinstance(message, wire.ToMover):  # not behind steps
                self._tiers.send(message.message)
                continue
            self._inbox.put(message)
            if isinstance(message, wire.Shutdown):
                if self._is_started:  # before that, the other ranks may never join a collective
                    time.sleep(_EXIT_SECONDS)
                os._exit(0)

    def _fail(self, reason: str) -> NoReturn:
        _log.error("%s", reason)
        with suppress(OSError):
            self._send(wire.Failed(reason))
        os._exit(_FAILED)

    def _send(self, message: wire.ToEngine) -> None:
        with self._sending:
            self._connection.sendall(encode(message))
