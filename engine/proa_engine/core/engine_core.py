"""EngineCore: runs steps that turn requests into outputs.

With asynchronous scheduling, step N+1 is scheduled and started before the host waits for the result of step N. If rows
sample under a grammar, step N+1 is sampled when the host knows the tokens of step N and the draft tokens of N+1, which
its masks depend on; its layers run meanwhile.

With pipeline stages as many steps are in flight as there are stages, and no request is in two that sample for it.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from proa.contract import EngineCoreRequest, LoadedLoras, SchedulerStats
from proa_engine.core.admission.request_admission import Admission
from proa_engine.core.constrained import ConstrainedRequest, constrained_rows, samples_to_mask
from proa_engine.core.counters import CoreCounters
from proa_engine.core.executor import Executor, StepFuture
from proa_engine.core.grammar import GrammarMasks, GrammarReady
from proa_engine.core.kv.mover import Adopted, DiskChanges, Fetched, FromMover
from proa_engine.core.operations import Operation
from proa_engine.core.outbox import Outbox
from proa_engine.core.request import Request
from proa_engine.core.run_operations import Operations
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.timing.step_costs import RowSizes, StepRows
from proa_engine.core.types import Rejection, SchedulerOutput, StepOutputs

T = TypeVar("T")


class _Started(NamedTuple):
    """A step in flight."""

    requests: list[Request]
    sizes: RowSizes
    time: float
    future: StepFuture


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Wake:
    """Makes `wait_for_work` return."""


@dataclass(frozen=True, slots=True)
class _FollowKvEvents:
    """Start (`follow`) or stop adding the changes of the prefix cache to outputs."""

    follow: bool


@dataclass(frozen=True, slots=True)
class _GrammarCompiled:
    request: ConstrainedRequest
    ready: GrammarReady


@dataclass(frozen=True, slots=True)
class _LoraRead:
    digest: "Future[str]"


_Message = (
    EngineCoreRequest | _Abort | _GrammarCompiled | FromMover | _LoraRead | _FollowKvEvents | Operation[Any] | _Wake
)


class EngineCore:
    """Runs steps on one thread. Requests and aborts may be submitted from any thread.

    `step_started_at` is when the current step began, on the monotonic clock; None between steps. `rows_in_flight` are
    the rows of the steps that are started and not finished, which the current step may wait for. Both may be read from
    any thread. `clock` returns the Unix time of events.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, clock: Callable[[], float] = time.time) -> None:
        self.step_started_at: float | None = None
        self.rows_in_flight: tuple[StepRows, ...] = ()
        self._scheduler = scheduler
        self._kv_events = scheduler.kv_events
        self._tiers = scheduler.tiers
        self.retention = scheduler.retention
        self._grammars = scheduler.grammars
        self._loras = scheduler.loras
        self._executor = executor
        self._clock = clock
        self._max_in_flight = scheduler.config.max_steps_in_flight  # when `step` returns
        self._counts_decodes = scheduler.config.num_speculative_tokens > 0  # steps without prompts and drafts too
        self._in_flight: deque[_Started] = deque()
        self._finished_at = 0.0  # when the last step was finished
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._operations = Operations(scheduler, executor, self._on_lora_read)
        self._operation: Operation[Any] | None = None  # read from the inbox and not run yet
        self._outbox = Outbox(scheduler.kv_events, scheduler.loras, self._operations)
        self._num_steps = 0

    @property
    def loaded_loras(self) -> LoadedLoras:
        """The adapters that requests may name. Read it before the first step; later changes are in the outputs."""
        return self._loras.loaded

    def submit(self, request: EngineCoreRequest) -> None:
        """Queue a request, from any thread. A rejection comes with a step's outputs."""
        self._inbox.put(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests, from any thread. Unknown ids are ignored."""
        self._inbox.put(_Abort(tuple(request_ids)))

    def take_from_mover(self, message: FromMover) -> None:
        """Take a message of the mover, from any thread."""
        self._inbox.put(message)

    def follow_kv_events(self) -> None:
        """Add a snapshot of the prefix cache to the next outputs, and changes to all later ones. From any thread."""
        self._inbox.put(_FollowKvEvents(True))

    def unfollow_kv_events(self) -> None:
        """Stop adding cache changes to outputs. From any thread."""
        self._inbox.put(_FollowKvEvents(False))

    def operate(self, operation: Operation[T]) -> "Future[T]":
        """Run an operator's call between two steps, from any thread. Returns `operation.done`."""
        operation.done.set_running_or_notify_cancel()  # a caller that stops waiting must not cancel it
        self._inbox.put(operation)
        return operation.done

    def wake(self) -> None:
        """Make `wait_for_work` return. From any thread or a signal handler."""
        self._inbox.put(_Wake())

    def has_unfinished_requests(self) -> bool:
        """Whether outputs are still to come. If all requests wait for grammars or fetches, `step` has nothing to do:
        call `wait_for_work` first."""
        return self.has_work() or self._scheduler.has_pending

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        if self._in_flight or self._operation is not None or not self._inbox.empty():
            return True
        return self._scheduler.has_work or self._operations.must_sleep or self._outbox.has_any

    def wait_for_work(self, timeout: float | None = None) -> None:
        """Block until there is something to do, `wake` is called or `timeout` seconds have passed."""
        if self.has_work():
            return
        with contextlib.suppress(Empty):
            self._read(self._inbox.get(timeout=timeout), self._clock())

    def step(self) -> StepOutputs | None:
        """Schedule and start the next step, finish the oldest one in flight, and return the new outputs, if any.

        Raises what the executor raises; the engine cannot continue then.
        """
        self._read_inbox()
        self._operate()
        self.step_started_at = time.monotonic()
        try:
            now = self._clock()
            scheduler_output, requests, outputs = self._scheduler.schedule(now)
            self._outbox.outputs += outputs
            started = self._start(scheduler_output, requests, now)
            if len(self._in_flight) > (self._max_in_flight if started else 0):
                self._finish_oldest()
            if not self._outbox.has_any:
                return None
            return self._outbox.take(self._clock(), self._num_steps)
        finally:
            self.step_started_at = None

    def stats(self) -> SchedulerStats:
        """Return the current statistics, in a new object. From any thread."""
        stats = self._scheduler.stats
        stats.sleep_level = self._operations.sleep_level
        return stats

    def counters(self) -> CoreCounters:
        """Return what has been counted since the start, and what the cache holds now. From any thread."""
        return self._scheduler.counters

    def check_integrity(self) -> None:
        """Raises `AssertionError` if the core's state is inconsistent. For tests."""
        self._scheduler.check_integrity()

    def _operate(self) -> None:
        """Run operators' calls. They are not timed as part of the step: loading weights may take minutes."""
        while (operation := self._operation) is not None:
            self._operation = None
            self._outbox.outputs += self._operations.run(operation, self._clock())
            self._read_inbox()
        if not self._in_flight and self._operations.must_sleep:
            self._operations.fall_asleep(self._clock())

    def _start(self, scheduler_output: SchedulerOutput, requests: list[Request], now: float) -> bool:
        """Start the step. Returns False if the workers have nothing to do."""
        if not scheduler_output.must_run:
            return False
        of_rows, num_drafted = [*scheduler_output.num_chunk_tokens.values()], scheduler_output.num_drafted_rows
        sizes = RowSizes(of_rows[:num_drafted], of_rows[num_drafted:])
        encodes = bool(scheduler_output.encoder_inputs or scheduler_output.cross_inputs)
        step_rows = StepRows(requests, sizes, encodes)
        self.rows_in_flight = (*self.rows_in_flight, step_rows)  # before the call, which may hang
        self._executor.execute_model(scheduler_output)
        rows = scheduler_output.grammar_rows
        masks = self._fill_masks(requests, rows) if rows else None
        self._in_flight.append(_Started(requests, sizes, now, self._executor.sample_tokens(masks)))
        return True

    def _fill_masks(self, requests: list[Request], rows: list[int]) -> GrammarMasks | None:
        """Return the masks of the started step's constrained rows, after waiting for the tokens that they depend on."""
        constrained = constrained_rows(requests, rows)
        if any(request.is_behind for request in constrained.values()):
            self._finish_oldest()  # at most one step was in flight when this one started
        samples = samples_to_mask(constrained, self._executor.draft_tokens())
        if not samples:
            return None
        return self._grammars.fill(samples)

    def _finish_oldest(self) -> None:
        step = self._in_flight.popleft()
        result = step.future.result()
        self.rows_in_flight = self.rows_in_flight[1:]
        self._read_inbox()  # so that requests aborted meanwhile get no more tokens
        now = self._clock()
        seconds = now - max(step.time, self._finished_at)  # with two in flight, one begins when the other has ended
        self._finished_at = now
        outputs, self._outbox.plain = self._scheduler.update_from_output(step.requests, result, now)
        if step.requests and (step.sizes.chunks or self._counts_decodes):
            self._scheduler.count_step(len(step.requests), step.sizes, seconds)
        self._outbox.outputs += outputs
        self._num_steps += 1

    def _read_inbox(self) -> None:
        """Read messages in order, up to an operator's call, which must run before later messages take effect. Only this
        thread reads."""
        while self._operation is None and not self._inbox.empty():
            self._read(self._inbox.get_nowait(), self._clock())

    def _read(self, message: _Message, now: float) -> None:
        match message:
            case EngineCoreRequest():
                self._outbox.add(self._add(message, now))
            case _Abort(request_ids):
                self._outbox.outputs += self._scheduler.abort_requests(request_ids, now)
            case _GrammarCompiled(request, ready):
                self._outbox.add(self._scheduler.set_grammar(request, ready, now))
            case Fetched():
                self._scheduler.queue_fetched(self._tiers.fetches.take(message, now))
            case Adopted():
                self._tiers.host.adopt(message)
            case DiskChanges():
                self._tiers.disk.take(message)
            case _LoraRead(digest):
                self._loras.finish_load(digest, self._on_lora_read)
            case _FollowKvEvents(follow):
                self._kv_events.follow() if follow else self._kv_events.unfollow()
            case Operation():
                self._operation = message
            case _Wake():
                pass

    def _add(self, request: EngineCoreRequest, now: float) -> Admission:
        self.retention.release(request.client_index, request.released)
        if self._operations.sleep_level:
            return Rejection(request.request_id, request.client_index, "unavailable", "the engine sleeps")
        return self._scheduler.add_request(request, now, self._on_grammar_ready)

    def _on_grammar_ready(self, request: ConstrainedRequest, ready: GrammarReady) -> None:
        self._inbox.put(_GrammarCompiled(request, ready))

    def _on_lora_read(self, digest: "Future[str]") -> None:
        self._inbox.put(_LoraRead(digest))
