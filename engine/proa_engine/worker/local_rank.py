"""LocalRank: a worker in this process, with the thread that plays its stream and the futures that wait for it.

The one place that knows in which thread device work happens. Rank 0 lives in the engine's process as a LocalRank, and
so does every other rank in its own. `fail` ends all waiting, whatever the device does.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import torch

from proa_engine.core.executor import ExecutorFailed, StepFuture
from proa_engine.core.types import ModelRunnerOutput, SchedulerOutput
from proa_engine.worker.async_output import DeviceOutput, collect
from proa_engine.worker.device_thread import DeviceThread
from proa_engine.worker.step_inputs import StepInputs
from proa_engine.worker.worker import Worker

T = TypeVar("T")
_CLOSE_SECONDS = 5.0
_NOTHING = ModelRunnerOutput(request_ids=[], sampled_token_ids=[])


class LocalRank:
    """Steps go to the device thread on a CPU; on CUDA they are launched in the caller's, and the device is the thread.
    A CPU's small steps are computed by whoever waits for them.

    `explain` turns what a step raised into the reason of the failure; `on_failure` hears of it, in any thread.
    """

    def __init__(
        self, worker: Worker, *, explain: Callable[[BaseException], str], on_failure: Callable[[str], None]
    ) -> None:
        self.worker = worker
        self._explain = explain
        self._on_failure = on_failure
        self._thread = DeviceThread("proa-device")
        self._lock = Lock()
        self._failed: Future[str] = Future()  # resolves to the reason
        self._pending: set[Future[ModelRunnerOutput]] = set()
        self._copy_stream: torch.cuda.Stream | None = None
        self._inputs: StepInputs | None = None

    @property
    def failure(self) -> str | None:
        return self._failed.result() if self._failed.done() else None

    def call(self, job: Callable[[], T]) -> T:
        """Run a job on the device thread and wait for it, or for `fail`: a hung device does not hold the caller."""
        return self.wait_for(self._thread.submit(job))

    def wait_for(self, future: "Future[T]", timeout: float | None = None) -> T:
        """The future's result; raises ExecutorFailed as soon as the rank fails."""
        either: tuple[Future[Any], ...] = (future, self._failed)
        wait(either, timeout, FIRST_COMPLETED)
        if future.done():
            return future.result()
        self._check()
        raise TimeoutError

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._check()
        self._inputs = inputs = self.worker.prepare(plan)
        if inputs is None:
            return
        if self.worker.device.type == "cuda":
            torch.cuda.set_device(self.worker.device)
            self._guarded(lambda: self.worker.forward(inputs))
        else:
            wake = not self.worker.is_small(inputs)
            self._thread.submit(lambda: self._guarded(lambda: self.worker.forward(inputs)), wake=wake)

    def sample_tokens(self) -> StepFuture:
        """Sample the step that `execute_model` started."""
        self._check()
        inputs, self._inputs = self._inputs, None
        future: Future[ModelRunnerOutput] = Future()
        if inputs is None:
            future.set_result(_NOTHING)
            return future
        if self.worker.device.type == "cuda":
            return self._launch_sampling(inputs)
        with self._lock:
            self._pending.add(future)
        is_small = self.worker.is_small(inputs)
        job = self._thread.submit(lambda: self._guarded(lambda: self._resolve(future, inputs)), wake=not is_small)
        return _HelpedFuture(future, job, self._thread) if is_small else future

    def sample_without_output(self) -> None:
        """The same on a rank that nobody asks for the result."""
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return
        if self.worker.device.type == "cuda":
            self._guarded(self.worker.sample)
        else:
            self._thread.submit(lambda: self._guarded(self.worker.sample))

    def fail(self, reason: str) -> None:
        """Raise ExecutorFailed in all that wait now or later. From any thread; the first reason stays."""
        with self._lock:
            if self._failed.done():
                return
            self._failed.set_result(reason)
            pending, self._pending = self._pending, set()
        for future in pending:
            future.set_exception(ExecutorFailed(reason))
        self._on_failure(reason)

    def shutdown(self) -> None:
        """Finish what is in line. A device thread that hangs is left behind, with its process group."""
        if self._thread.close(_CLOSE_SECONDS):
            self.worker.shutdown()

    def _check(self) -> None:
        if self._failed.done():
            raise ExecutorFailed(self._failed.result())

    def _guarded(self, job: Callable[[], object]) -> None:
        """Run device work unless the rank has failed; what it raises is the rank's failure."""
        if self._failed.done():
            return
        try:
            job()
        except BaseException as error:
            self.fail(self._explain(error))

    def _resolve(self, future: "Future[ModelRunnerOutput]", inputs: StepInputs) -> None:
        output = collect(self.worker.sample(), inputs)
        with self._lock:
            is_waited_for = future in self._pending
            self._pending.discard(future)
        if is_waited_for:
            future.set_result(output)

    def _launch_sampling(self, inputs: StepInputs) -> StepFuture:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()
        try:
            return DeviceOutput(self.worker.sample(), inputs, self._copy_stream)
        except BaseException as error:
            self.fail(self._explain(error))
            raise ExecutorFailed(self._failed.result()) from error


@dataclass(frozen=True, slots=True)
class _HelpedFuture:
    """A StepFuture of a step that nobody was woken for."""

    future: "Future[ModelRunnerOutput]"
    job: "Future[None]"  # that resolves it
    thread: DeviceThread

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.future.done():
            self.thread.help(self.job)
        return self.future.result(timeout)
