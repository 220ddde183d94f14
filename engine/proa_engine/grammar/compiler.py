"""GrammarCompiler: compiles the grammars of requests on two threads, and keeps compiled ones.

Tenants take turns, by the time that compiling their grammars has taken.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from proa.contract import EngineCoreRequest, Grammar
from proa.grammar import GrammarError
from proa_engine.core.grammar import GrammarCursor, GrammarReady
from proa_engine.grammar.builder import TooComplex, Unsatisfiable
from proa_engine.grammar.compiled import CompiledGrammar, GrammarCache, Outcome
from proa_engine.grammar.masks import WORD, LLGuidanceMatcher
from proa_engine.grammar.stats import GrammarStats

SMALL_BYTES = 8 * 1024  # texts that have a thread of their own, which large ones never hold up
STACK_BYTES = 128 * 1024 * 1024  # of address space; what `check_complexity` accepts uses less than half of it

Ready = Callable[[GrammarReady], None]
IsWanted = Callable[[], bool]
Build = Callable[[str], CompiledGrammar]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Beyond these, requests are refused as retryable: the number of queued texts, and the seconds that a text waits
    whose tenant has others too."""

    max_jobs: float
    max_seconds: float


SERVING_LIMITS = QueueLimits(64, 0.5)
NO_LIMITS = QueueLimits(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str  # of `GrammarStats`
    message: str  # a sentence for the client
    retryable: bool = False


_QUEUE_FULL = _Refusal("queue_full", "the engine is busy compiling grammars", retryable=True)
_QUEUE_TIMEOUT = _Refusal("queue_timeout", "the grammar waited too long for its compilation", retryable=True)
_WRONG_RESUMED = _Refusal("resumed", "resumed_token_ids do not match the grammar")
_MEMORY_FULL = _Refusal("memory_full", "the grammars of running requests use all memory for grammars", retryable=True)
_NO_TOKEN = _Refusal("unsatisfiable", "none of allowed_token_ids can begin an output that matches the grammar")


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: EngineCoreRequest
    ready: Ready
    is_wanted: IsWanted


@dataclass(slots=True, eq=False)
class _Compilation:
    """One text, and the requests that wait for it. `tenant`: of the first."""

    text: str
    tenant: str
    is_small: bool
    added_at: float
    waiting: list[_Waiting] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        return any(each.is_wanted() for each in self.waiting)


class _Queue:
    """Jobs that wait. The next one is of the tenant with the fewest jobs running, then of the one whose jobs have taken
    the least time. Start-time fair queuing (Goyal et al., 1996), as in the gateway, with times known afterwards."""

    def __init__(self) -> None:
        self.jobs: list[_Compilation] = []
        self._running: Counter[str] = Counter()
        self._used: dict[str, float] = {}  # seconds, of tenants with jobs and of those ahead of the virtual time
        self._virtual_time = 0.0

    def __len__(self) -> int:
        return len(self.jobs)

    def push(self, job: _Compilation) -> None:
        if job.tenant not in self._used or not self._has_jobs(job.tenant):
            self._used[job.tenant] = max(self._used.get(job.tenant, 0.0), self._virtual_time)
        self.jobs.append(job)

    def pop(self, only_small: bool) -> _Compilation | None:
        """Take the next job, to be ended by `finish`."""
        eligible = [job for job in self.jobs if job.is_small or not only_small]
        if not eligible:
            return None
        job = min(eligible, key=lambda each: (self._running[each.tenant], self._used[each.tenant]))
        self._virtual_time = max(self._virtual_time, self._used[job.tenant])
        self.jobs.remove(job)
        self._running[job.tenant] += 1
        return job

    def finish(self, job: _Compilation, seconds: float) -> None:
        self._running[job.tenant] -= 1
        self._used[job.tenant] += seconds
        self._running += Counter()  # without zeros
        for tenant in [each for each, used in self._used.items() if used <= self._virtual_time]:
            if not self._has_jobs(tenant):
                del self._used[tenant]

    def pop_last_of_largest(self, tenant: str) -> _Compilation | None:
        """Take out the last job of the tenant with the most, if these are more than `tenant` would have."""
        counts = Counter(job.tenant for job in self.jobs)
        largest, count = counts.most_common(1)[0]
        if count <= counts[tenant] + 1:
            return None
        job = next(job for job in reversed(self.jobs) if job.tenant == largest)
        self.jobs.remove(job)
        return job

    def is_alone(self, job: _Compilation) -> bool:
        """Whether the tenant of a running job has no others, so that it has waited for other tenants alone."""
        return self._running[job.tenant] == 1 and all(each.tenant != job.tenant for each in self.jobs)

    def _has_jobs(self, tenant: str) -> bool:
        return self._running[tenant] > 0 or any(job.tenant == tenant for job in self.jobs)


class GrammarCompiler:
    """`build` returns a grammar or raises `GrammarError`, and is called on two threads. `clock` is monotonic."""

    def __init__(
        self,
        build: Build,
        stats: GrammarStats,
        limits: QueueLimits,
        cache: GrammarCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._stats = stats
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows
        self._queue = _Queue()
        self._jobs: dict[str, _Compilation] = {}  # by text: queued and running ones
        self._cache = cache
        self._closed = False
        self._threads = [_start_thread(self._work, only_small) for only_small in (False, True)]

    def prepare(self, request: EngineCoreRequest, ready: Ready, is_wanted: IsWanted) -> GrammarCursor | None:
        """Implement `core.grammar.Grammars.prepare`. Callable from any thread."""
        grammar = _grammar(request)
        evicted: _Compilation | None = None
        with self._changed:
            outcome = self._cache.get(grammar.text)
            self._stats.observe_query(hit=outcome is not None)
            if outcome is None or (request.resumed_token_ids and isinstance(outcome, CompiledGrammar)):
                outcome, evicted = self._enqueue(grammar.text, _Waiting(request, ready, is_wanted))
        for each in evicted.waiting if evicted is not None else ():
            self._refuse(each.request, each.ready, _QUEUE_FULL)
        if outcome is None:
            return None
        cursor = _make_cursor(request, outcome)
        if isinstance(cursor, GrammarCursor):
            return cursor
        self._refuse(request, ready, cursor)
        return None

    def close(self) -> None:
        """End the threads, after the jobs that they run. Requests that wait are not answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _enqueue(self, text: str, waiting: _Waiting) -> tuple[_Refusal | None, _Compilation | None]:
        """Return why the text cannot wait, and a job that its own took the place of."""
        job, evicted = self._jobs.get(text), None
        if job is None:
            if self._cache.is_full:
                return _MEMORY_FULL, None
            tenant = _tenant(waiting.request)
            if len(self._queue) >= self._limits.max_jobs:
                self._drop_unwanted()
            if len(self._queue) >= self._limits.max_jobs:
                evicted = self._queue.pop_last_of_largest(tenant)
                if evicted is None:
                    return _QUEUE_FULL, None
                del self._jobs[evicted.text]
            job = self._jobs[text] = _Compilation(text, tenant, len(text) < SMALL_BYTES, self._clock())
            self._queue.push(job)
            self._changed.notify_all()
        job.waiting.append(waiting)
        return None, evicted

    def _drop_unwanted(self) -> None:
        for job in [job for job in self._queue.jobs if not job.is_wanted]:
            self._queue.jobs.remove(job)
            del self._jobs[job.text]

    def _work(self, only_small: bool) -> None:
        while (job := self._next_job(only_small)) is not None:
            started = time.perf_counter()
            outcome = _QUEUE_TIMEOUT if self._is_late(job) else self._run(job.text)
            for each in self._end(job, outcome, time.perf_counter() - started):
                self._settle(each.request, each.ready, outcome)

    def _next_job(self, only_small: bool) -> _Compilation | None:
        """Wait for a job that is wanted; None: the compiler is closed."""
        with self._changed:
            while not self._closed:
                job = self._queue.pop(only_small)
                if job is None:
                    self._changed.wait()
                    continue
                if job.is_wanted:
                    return job
                self._queue.finish(job, 0.0)
                del self._jobs[job.text]
        return None

    def _is_late(self, job: _Compilation) -> bool:
        with self._changed:
            return self._clock() - job.added_at > self._limits.max_seconds and not self._queue.is_alone(job)

    def _run(self, text: str) -> Outcome:
        with self._changed:
            outcome = self._cache.get(text)
        if outcome is not None:  # a request with resumed tokens
            return outcome
        started = time.perf_counter()
        try:
            outcome = self._build(text)
        except TooComplex as error:
            outcome = _Refusal("too_complex", str(error))
        except Unsatisfiable as error:
            outcome = _Refusal("unsatisfiable", str(error))
        except GrammarError as error:
            outcome = _Refusal("invalid", str(error))
        except Exception:  # the thread must go on with other requests' grammars
            _log.exception("compiling a grammar failed")
            outcome = _Refusal("invalid", "the grammar cannot be compiled")
        self._stats.observe_compile(time.perf_counter() - started)
        return outcome

    def _end(self, job: _Compilation, outcome: Outcome, seconds: float) -> list[_Waiting]:
        """Keep the outcome and return the requests that wait for it; no more will."""
        with self._changed:
            self._queue.finish(job, seconds)
            del self._jobs[job.text]
            if outcome is not _QUEUE_TIMEOUT and self._cache.get(job.text) is not outcome:
                self._cache.add(job.text, job.tenant, outcome)
        return job.waiting

    def _settle(self, request: EngineCoreRequest, ready: Ready, outcome: Outcome) -> None:
        cursor = _make_cursor(request, outcome)
        if not isinstance(cursor, GrammarCursor):
            self._refuse(request, ready, cursor)
        elif all(map(cursor.accept, request.resumed_token_ids)):
            ready(GrammarReady(request.request_id, cursor))
        else:
            self._refuse(request, ready, _WRONG_RESUMED)

    def _refuse(self, request: EngineCoreRequest, ready: Ready, refusal: _Refusal) -> None:
        self._stats.observe_refusal(refusal.reason)
        ready(GrammarReady(request.request_id, error=refusal.message, retryable=refusal.retryable))


def _grammar(request: EngineCoreRequest) -> Grammar:
    grammar = request.sampling_params.grammar
    assert grammar is not None, "the request has a grammar"
    return grammar


def _tenant(request: EngineCoreRequest) -> str:
    return request.tenant or f"session {request.client_index}"


def _make_cursor(request: EngineCoreRequest, outcome: Outcome) -> GrammarCursor | _Refusal:
    if not isinstance(outcome, CompiledGrammar):
        assert isinstance(outcome, _Refusal)
        return outcome
    params, grammar = request.sampling_params, _grammar(request)
    if params.allowed_token_ids and not grammar.start_after and not _may_begin(outcome, params.allowed_token_ids):
        return _NO_TOKEN
    matcher = LLGuidanceMatcher(outcome, params.stop_token_ids, ignores_end=params.ignore_eos)
    return GrammarCursor(grammar, matcher)


def _may_begin(grammar: CompiledGrammar, token_ids: Sequence[int]) -> bool:
    """Whether the output may begin with one of the tokens."""
    mask = np.frombuffer(grammar.start().compute_bitmask(), np.uint32)
    return any(mask[token_id // WORD] >> np.uint32(token_id % WORD) & 1 for token_id in token_ids)


def _start_thread(work: Callable[[bool], None], only_small: bool) -> threading.Thread:
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, args=(only_small,), name="proa-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
