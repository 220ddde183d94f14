"""Shutdown: how a serving process leaves, politely or not. Health is always the first to know.

asked to (a signal)   NOT_SERVING, sessions are told, what runs finishes; a second signal ends it at once
a step raises         NOT_SERVING, sessions fail, exit 1
a step hangs          NOT_SERVING when it is late; when there is no more hope, sessions fail, exit 1
"""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from proa_engine.server.errors import Draining, EngineDead
from proa_engine.server.health import Health
from proa_engine.server.request_router import RequestRouter
from proa_engine.server.watchdog import Verdict

FAREWELL_SECONDS = 0.5  # for last words to reach the network
LEAVE_SECONDS = 8.0  # for the last step to end and the workers to leave, once nothing is waited for

_log = logging.getLogger(__name__)


class Shutdown:
    """Its methods belong to different threads; each says to which."""

    def __init__(
        self,
        frontend: RequestRouter,
        health: Health,
        *,
        run_on_io_thread: Callable[[Coroutine[Any, Any, None]], "Future[None]"],
        last_rites: Callable[[], None],
        drain_timeout: float,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`last_rites` is called before a process that cannot go on exits, and may take what is left of its time."""
        self._frontend = frontend
        self._health = health
        self._run_on_io_thread = run_on_io_thread
        self._last_rites = last_rites
        self._drain_timeout = drain_timeout
        self._exit_process = exit_process
        self._draining: asyncio.Task[None] | None = None
        self._stop: Callable[[], None] | None = None
        self._fail_executor: Callable[[str], None] | None = None
        self.failure: str | None = None  # set by any thread: why the process cannot go on. The watchdog acts on it.
        self.gone = threading.Event()

    def on_loaded(self, stop: Callable[[], None], fail_executor: Callable[[str], None]) -> None:
        """I/O thread: from now on there is a loop to stop, an executor to give up and requests to wait for."""
        self._stop = stop
        self._fail_executor = fail_executor

    def on_signal(self, number: signal.Signals) -> None:
        """I/O thread."""
        if self._draining is not None:
            _log.warning("%s again: leaving at once", number.name)
            self._exit_process(128 + number)
        elif self._stop is None:
            _log.info("%s while loading: leaving", number.name)
            self._exit_process(0)
        else:
            _log.info("%s: finishing what runs, for at most %.0f s", number.name, self._drain_timeout)
            self._draining = asyncio.get_running_loop().create_task(self._drain(self._stop))

    def on_verdict(self, verdict: Verdict, age: float, num_ranks: int) -> None:
        """Watchdog thread: the running step is late, is not any more, or will not end."""
        if verdict is Verdict.DEAD:
            suspects = f"; one of the tensor-parallel ranks 0 to {num_ranks - 1} hangs" if num_ranks > 1 else ""
            self.die(f"a step has been running for {age:.1f} s and does not end{suspects}")
            return
        late = verdict is Verdict.LATE
        if late:
            _log.error("a step is late: it has been running for %.1f s; NOT_SERVING until it ends", age)
        else:
            _log.info("steps are on time again")
        self._wait(self._health.update(step_late=late))

    def die(self, reason: str) -> None:
        """Watchdog thread: tell everybody and exit with status 1. A hung device cannot be left more politely."""
        _log.critical("the engine cannot go on: %s", reason)
        self._wait(self._health.update(dead=True))
        self._wait(self._fail(EngineDead(f"the engine cannot go on: {reason}")))
        if self._fail_executor is not None:
            self._fail_executor(reason)
        threading.Thread(target=self._last_rites, name="proa-last-rites", daemon=True).start()
        time.sleep(FAREWELL_SECONDS)
        self._exit_process(1)
        self.gone.set()

    async def _drain(self, stop: Callable[[], None]) -> None:
        await self._health.update(draining=True)
        self._frontend.drain()
        try:
            async with asyncio.timeout(self._drain_timeout):
                await self._frontend.wait_until_idle()
        except TimeoutError:
            _log.warning("requests still run after %.0f s; they are given up", self._drain_timeout)
            self._frontend.fail(Draining("the engine shut down before this request could finish"))
        stop()
        await asyncio.sleep(LEAVE_SECONDS)  # ended when the main thread stops this one
        _log.error("the running step does not end: leaving all the same")
        self._exit_process(1)

    async def _fail(self, error: EngineDead) -> None:
        self._frontend.fail(error)

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it on the I/O thread, but do not wait for a thread that hangs."""
        try:
            self._run_on_io_thread(work).result(timeout=1.0)
        except TimeoutError:
            _log.error("the I/O thread does not answer")
