"""RankServer: one engine's commands on a socket, carried out by a LocalRank.

A thread of its own reads the socket, so that the engine's end is seen whatever this rank is doing, and ends the
process: the device thread may be in a collective that no other rank will ever join.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import NoReturn

from proa_engine.worker import wire
from proa_engine.worker.distributed import Rendezvous
from proa_engine.worker.local_rank import LocalRank
from proa_engine.worker.worker import Worker

_LOST = 1  # exit code: the engine or this rank went down


class RankServer:
    def __init__(self, connection: socket.socket, rank: int, report: Callable[[str], None]) -> None:
        self._connection = connection
        self._rank = rank
        self._report = report
        self._inbox: SimpleQueue[wire.ToWorker] = SimpleQueue()
        self._is_up = False

    def serve(self) -> int:
        """Serve until the engine says goodbye; returns the exit code. Does not return where the engine is lost."""
        Thread(target=self._read, name="proa-engine-link", daemon=True).start()
        try:
            local = self._bring_up()
        except Exception as error:
            self._leave(_explain(error))
        self._is_up = True
        while isinstance(message := self._inbox.get(), wire.Step):
            local.execute_model(message.plan)
            local.sample_without_output()
        assert isinstance(message, wire.Shutdown)
        self._report("the engine said goodbye")
        local.shutdown()
        return 0

    def _bring_up(self) -> LocalRank:
        init = self._inbox.get()
        assert isinstance(init, wire.Init)
        config = init.config
        ranks_here = 1 if config.worker_sockets else config.tensor_parallel_size
        worker = Worker(config, self._rank, self._report, ranks_here=ranks_here)
        local = LocalRank(worker, explain=_explain, on_failure=self._leave)
        rendezvous = Rendezvous(init.generation, init.port, self._rank, config.tensor_parallel_size)
        local.call(lambda: worker.init_device(rendezvous))
        self._send(wire.Ready(init.generation, local.call(worker.load_model)))
        start = self._inbox.get()
        assert isinstance(start, wire.Start)
        local.call(lambda: worker.start(start.num_blocks))
        self._send(wire.Started())
        return local

    def _read(self) -> None:
        reader = wire.worker_reader(self._connection)
        while (message := reader.read()) is not None:
            self._inbox.put(message)
            if isinstance(message, wire.Shutdown):
                if not self._is_up:  # the engine gave up, and the other ranks may never come
                    os._exit(0)
                return
        self._report("the engine is gone")
        os._exit(_LOST)

    def _leave(self, reason: str) -> NoReturn:
        self._report(reason)
        with suppress(OSError):
            self._send(wire.Failed(reason))
        os._exit(_LOST)

    def _send(self, message: wire.ToEngine) -> None:
        self._connection.sendall(wire.encode(message))


def _explain(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
