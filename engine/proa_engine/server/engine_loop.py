"""EngineLoop: the main thread's busy loop. It steps the core and hands each step's outputs to the I/O thread.

An idle engine waits in the core and uses no CPU. Knows nothing of gRPC.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from proa_engine.core.types import StepOutputs


class SteppedCore(Protocol):
    """What the loop needs of the engine core."""

    def wait_for_work(self) -> None: ...

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> StepOutputs | None: ...

    def wake(self) -> None: ...


class Handoff:
    """Outputs on their way from the main thread to the I/O thread: one wake-up for all that has gathered."""

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        take: Callable[[StepOutputs], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """`call_soon` runs a function on the I/O thread, where `take` gets each step's outputs in order."""
        self._call_soon = call_soon
        self._take = take
        self._on_error = on_error
        self._steps: deque[StepOutputs] = deque()

    def put(self, outputs: StepOutputs) -> None:
        """Called by the main thread."""
        self._steps.append(outputs)
        # The I/O thread removes a step only after it was taken, so a length above one means that it is still at it
        # and will see this step too. A wake-up too many does no harm.
        if len(self._steps) == 1:
            self._call_soon(self._drain)

    def _drain(self) -> None:
        try:
            while self._steps:
                self._take(self._steps[0])
                self._steps.popleft()
        except Exception as error:
            self._on_error(error)


class EngineLoop:
    """Runs on the main thread until it is stopped from another."""

    def __init__(self, core: SteppedCore, handoff: Handoff, on_step: Callable[[float], None]) -> None:
        """`on_step` is told each step's duration in seconds."""
        self._core = core
        self._handoff = handoff
        self._on_step = on_step
        self._stopped = False

    def run(self) -> None:
        """Raises what the core and the executor raise."""
        while not self._stopped:
            self._core.wait_for_work()
            if not self._core.has_unfinished_requests():
                continue
            started = time.monotonic()
            outputs = self._core.step()
            if outputs is not None:
                self._on_step(time.monotonic() - started)
                self._handoff.put(outputs)

    def stop(self) -> None:
        """Any thread. The loop ends after the current step."""
        self._stopped = True
        self._core.wake()
