"""EngineLoop: the main thread's busy loop. It steps the core and passes each step's outputs to the I/O thread.

An idle loop blocks in the core and uses no CPU.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from proa_engine.core.types import StepOutputs


class LoopCore(Protocol):
    """The part of `EngineCore` that the loop calls."""

    def wait_for_work(self) -> None: ...

    def has_work(self) -> bool: ...

    def step(self) -> StepOutputs | None: ...

    def wake(self) -> None: ...


class OutputQueue:
    """Steps' outputs on their way from the main thread to the I/O thread. One wake-up serves all queued steps."""

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        deliver: Callable[[StepOutputs], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """`call_soon` schedules a function on the I/O thread. `deliver` is called there with each step's outputs in
        order, `on_error` with what it raises."""
        self._call_soon = call_soon
        self._deliver = deliver
        self._on_error = on_error
        self._steps: deque[StepOutputs] = deque()

    def put(self, outputs: StepOutputs) -> None:
        """Called on the main thread."""
        self._steps.append(outputs)
        # The I/O thread removes a step after delivering it. A length above one therefore means that `_deliver_all` is
        # scheduled or running and will see this step too. A superfluous wake-up does no harm.
        if len(self._steps) == 1:
            self._call_soon(self._deliver_all)

    def _deliver_all(self) -> None:
        try:
            while self._steps:
                self._deliver(self._steps[0])
                self._steps.popleft()
        except Exception as error:
            self._on_error(error)


class EngineLoop:
    """Steps the core on the thread that calls `run`, until another thread calls `stop`."""

    def __init__(self, core: LoopCore, output_queue: OutputQueue, on_step: Callable[[float], None]) -> None:
        """`on_step` is called with the duration in seconds of each step that has outputs."""
        self._core = core
        self._output_queue = output_queue
        self._on_step = on_step
        self._stopped = False

    def run(self) -> None:
        """Step until stopped. Raises what the core and the executor raise."""
        while not self._stopped:
            self._core.wait_for_work()
            if not self._core.has_work():
                continue
            started = time.monotonic()
            outputs = self._core.step()
            if outputs is not None:
                self._on_step(time.monotonic() - started)
                self._output_queue.put(outputs)

    def stop(self) -> None:
        """End the loop after the current step. Callable from any thread."""
        self._stopped = True
        self._core.wake()
