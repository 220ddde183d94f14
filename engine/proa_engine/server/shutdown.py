"""ShutdownHandler: ends the serving process on a signal or after a failure. Health changes before anything else.

a signal           NOT_SERVING, sessions get Draining, running requests finish, exit 0; a second signal exits at once
a step raises      NOT_SERVING, sessions fail, exit 1
a step hangs       NOT_SERVING while it is late; when it is hung, sessions fail, exit 1

Python runs signal handlers on the main thread only, between two bytecode instructions. The byte that the interpreter
writes to the wake-up file descriptor arrives at once, and another thread can read it, even while the main thread hangs
in a device call (`SignalPipe`).
"""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any

from proa_engine.server.errors import Draining, EngineDead
from proa_engine.server.health import Health
from proa_engine.server.request_router import RequestRouter
from proa_engine.server.watchdog import StepStatus

FLUSH_SECONDS = 0.5  # for the last messages and statuses to reach clients
EXIT_SECONDS = 8.0  # after draining, for the last step to end and the workers to exit

_log = logging.getLogger(__name__)


class SignalPipe:
    """Turns signals into calls on the thread that polls `fileno()`. Construct it on the main thread."""

    def __init__(self, signals: Iterable[signal.Signals], on_signal: Callable[[signal.Signals], None]) -> None:
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        for number in signals:
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> None:
        """Call `on_signal` for each signal that has arrived."""
        for number in self._reader.recv(64):
            self._on_signal(signal.Signals(number))


class ShutdownHandler:
    """Each method's docstring names the thread that calls it."""

    def __init__(
        self,
        router: RequestRouter,
        health: Health,
        *,
        run_on_io_thread: Callable[[Coroutine[Any, Any, None]], "Future[None]"],
        flush_traces: Callable[[], None],
        drain_timeout: float,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`flush_traces` runs on a thread of its own before a failed process exits, for at most `FLUSH_SECONDS`."""
        self._router = router
        self._health = health
        self._run_on_io_thread = run_on_io_thread
        self._flush_traces = flush_traces
        self._drain_timeout = drain_timeout
        self._exit_process = exit_process
        self._draining: asyncio.Task[None] | None = None
        self._num_ranks = 1
        self._stop: Callable[[], None] | None = None
        self._fail_executor: Callable[[str], None] | None = None
        self.failure: str | None = None  # why the engine failed; set by any thread, the watchdog calls `fail` with it
        self.exited = threading.Event()

    def on_loaded(self, stop: Callable[[], None], fail_executor: Callable[[str], None], *, num_ranks: int) -> None:
        """I/O thread. `stop` ends the engine loop; `fail_executor` makes all calls that wait for the executor raise."""
        self._num_ranks = num_ranks
        self._stop = stop
        self._fail_executor = fail_executor

    def on_signal(self, number: signal.Signals) -> None:
        """I/O thread."""
        if self._draining is not None:
            _log.warning("%s again: exiting at once", number.name)
            self._exit_process(128 + number)
        elif self._stop is None:
            _log.info("%s while loading: exiting", number.name)
            self._exit_process(0)
        else:
            _log.info("%s: draining running requests for at most %.0f s", number.name, self._drain_timeout)
            self._draining = asyncio.get_running_loop().create_task(self._drain(self._stop))

    def on_step_status(self, status: StepStatus, age: float) -> None:
        """Watchdog thread. `age` is the running step's, in seconds."""
        if status is StepStatus.HUNG:
            suspects = f"; one of the ranks 0 to {self._num_ranks - 1} hangs" if self._num_ranks > 1 else ""
            self.fail(f"a step has been running for {age:.1f} s and does not end{suspects}")
            return
        late = status is StepStatus.LATE
        if late:
            _log.error("step late: running for %.1f s; NOT_SERVING until it ends", age)
        else:
            _log.info("steps are on time again")
        self._run_and_wait(self._health.update(step_late=late))

    def fail(self, reason: str) -> None:
        """Watchdog thread: fail all requests and exit with status 1. A hung device call cannot be stopped, so the
        process does not wait for the main thread."""
        _log.critical("engine failed, exiting: %s", reason)
        self._run_and_wait(self._health.update(dead=True))
        self._run_and_wait(self._fail_requests(EngineDead(f"the engine cannot go on: {reason}")))
        if self._fail_executor is not None:
            self._fail_executor(reason)
        threading.Thread(target=self._flush_traces, name="proa-flush-traces", daemon=True).start()
        time.sleep(FLUSH_SECONDS)
        self._exit_process(1)
        self.exited.set()

    async def _drain(self, stop: Callable[[], None]) -> None:
        await self._health.update(draining=True)
        self._router.drain()
        try:
            async with asyncio.timeout(self._drain_timeout):
                await self._router.wait_until_idle()
        except TimeoutError:
            _log.warning("drain timeout: requests still running after %.0f s are failed", self._drain_timeout)
            self._router.fail(Draining("the engine shut down before this request could finish"))
        stop()
        await asyncio.sleep(EXIT_SECONDS)  # the main thread cancels this task when its last step has ended
        _log.error("running step does not end: exiting without it")
        self._exit_process(1)

    async def _fail_requests(self, error: EngineDead) -> None:
        self._router.fail(error)

    def _run_and_wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the I/O thread, and wait for at most one second, as that thread may hang too."""
        try:
            self._run_on_io_thread(work).result(timeout=1.0)
        except TimeoutError:
            _log.error("I/O thread does not answer")
