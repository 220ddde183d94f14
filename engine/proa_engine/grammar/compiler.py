"""GrammarCompiler: compiles the grammars of requests on two threads, and keeps compiled ones.

GrammarBuilder: a grammar's text to a matcher, which is tried on random outputs.
"""

import logging
import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from proa.contract import EngineCoreRequest, Grammar
from proa.grammar import GrammarError, check_complexity, clean, is_panic
from proa_engine.core.grammar import GrammarCursor, GrammarReady
from proa_engine.grammar.masks import WORD, GrammarTokenizer, LLGuidanceMatcher, Words, allow, num_words
from proa_engine.grammar.stats import GrammarStats

NUM_WALKS = 4
WALK_TOKENS = 24
MASK_SECONDS = 0.005  # processor time of a mask in a walk
SPARE_SECONDS = 0.05  # by which all masks of the walks together may exceed it

_LIMITS = LLParserLimits(max_lexer_states=30_000, verbose_errors=False)

SMALL_BYTES = 8 * 1024  # texts that have a thread of their own, which large ones never hold up
STACK_BYTES = 128 * 1024 * 1024  # of address space; what `check_complexity` accepts uses less than half of it
CACHE_ENTRIES = 1024
CACHE_BYTES = 4 * 1024 * 1024  # of text; a compiled grammar takes about 40 times as much

Ready = Callable[[GrammarReady], None]
IsWanted = Callable[[], bool]
Build = Callable[[str], LLMatcher]

_log = logging.getLogger(__name__)


class TooComplex(GrammarError):
    """The grammar can be compiled, but llguidance fails or takes too long to compute masks."""

    def __init__(self) -> None:
        super().__init__("the grammar is too complex")


class GrammarBuilder:
    """Builds matchers for one tokenizer. Thread-safe. A thread that calls it needs a stack of 64 MiB."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._one_byte_tokens = np.zeros(num_words(tokenizer), np.uint32)
        allow(self._one_byte_tokens, [i for i in range(tokenizer.vocab_size) if len(tokenizer.decode_bytes([i])) == 1])

    def build(self, text: str) -> LLMatcher:
        """Returns a matcher at the grammar's beginning, whose first mask is computed.

        Raises `GrammarError` with a sentence for the client. Releases the interpreter lock most of the time.
        """
        check_complexity(text)
        try:
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
            if matcher.is_error():
                raise GrammarError(clean(matcher.get_error()))
            matcher.compute_bitmask()
            self._try(matcher)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise TooComplex from None
        return matcher

    def _try(self, matcher: LLMatcher) -> None:
        """Walk through the grammar at random: some grammars fail, or get slow, only after a few tokens."""
        rng, spare = random.Random(0), SPARE_SECONDS
        for _ in range(NUM_WALKS):
            for seconds in self._walk(matcher.deep_copy(), rng):
                spare -= max(0.0, seconds - MASK_SECONDS)
                if spare < 0:
                    raise TooComplex

    def _walk(self, matcher: LLMatcher, rng: random.Random) -> Iterator[float]:
        """Consume random tokens, every second one of a single byte if possible. Yields the times of the masks."""
        for step in range(WALK_TOKENS):
            started = time.thread_time()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(self._one_byte_tokens)]
            yield time.thread_time() - started
            if not mask.any():
                raise TooComplex
            one_byte = mask & self._one_byte_tokens
            matcher.consume_token(_random_token(one_byte if step % 2 and one_byte.any() else mask, rng))
            if matcher.is_error():
                raise TooComplex
            if matcher.is_stopped():
                return


def _random_token(mask: Words, rng: random.Random) -> int:
    """A token of the mask, which is not empty: first a word, then a bit of it."""
    index = int(rng.choice(mask.nonzero()[0]))
    word = int(mask[index])
    return index * WORD + rng.choice([bit for bit in range(WORD) if word >> bit & 1])


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Beyond these, requests are refused as retryable: the number of queued texts, and the seconds in the queue."""

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
_Outcome = LLMatcher | _Refusal


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: EngineCoreRequest
    ready: Ready
    is_wanted: IsWanted


@dataclass(slots=True, eq=False)
class _Compilation:
    """One text, and the requests that wait for it."""

    text: str
    is_small: bool
    added_at: float
    waiting: list[_Waiting] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        return any(each.is_wanted() for each in self.waiting)


class GrammarCompiler:
    """`build` returns a matcher or raises `GrammarError`, and is called on two threads. `clock` is monotonic."""

    def __init__(
        self, build: Build, stats: GrammarStats, limits: QueueLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._build = build
        self._stats = stats
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()  # guards what follows
        self._queue: list[_Compilation] = []
        self._jobs: dict[str, _Compilation] = {}  # by text: queued and running ones
        self._cache: OrderedDict[str, _Outcome] = OrderedDict()  # least recently used first
        self._cached_bytes = 0
        self._closed = False
        self._threads = [_start_thread(self._work, only_small) for only_small in (False, True)]

    def prepare(self, request: EngineCoreRequest, ready: Ready, is_wanted: IsWanted) -> GrammarCursor | None:
        """Implement `core.grammar.Grammars.prepare`. Callable from any thread."""
        grammar = _grammar(request)
        with self._changed:
            outcome = self._look_up(grammar.text)
            self._stats.observe_query(hit=outcome is not None)
            if outcome is None or (request.resumed_token_ids and isinstance(outcome, LLMatcher)):
                if self._enqueue(grammar.text, _Waiting(request, ready, is_wanted)):
                    return None
                outcome = _QUEUE_FULL
        if isinstance(outcome, LLMatcher):
            return _make_cursor(request, outcome)
        self._refuse(request, ready, outcome)
        return None

    def close(self) -> None:
        """End the threads, after the jobs that they run. Requests that wait are not answered."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _enqueue(self, text: str, waiting: _Waiting) -> bool:
        job = self._jobs.get(text)
        if job is None:
            if len(self._queue) >= self._limits.max_jobs:
                self._drop_unwanted()
            if len(self._queue) >= self._limits.max_jobs:
                return False
            job = self._jobs[text] = _Compilation(text, len(text) < SMALL_BYTES, self._clock())
            self._queue.append(job)
            self._changed.notify_all()
        job.waiting.append(waiting)
        return True

    def _drop_unwanted(self) -> None:
        for job in [job for job in self._queue if not job.is_wanted]:
            self._queue.remove(job)
            del self._jobs[job.text]

    def _work(self, only_small: bool) -> None:
        while (job := self._next_job(only_small)) is not None:
            is_late = self._clock() - job.added_at > self._limits.max_seconds
            outcome = _QUEUE_TIMEOUT if is_late else self._run(job.text)
            for each in self._end(job, outcome):
                self._settle(each.request, each.ready, outcome)

    def _next_job(self, only_small: bool) -> _Compilation | None:
        """Wait for a job that is wanted; None: the compiler is closed."""
        with self._changed:
            while not self._closed:
                job = next((job for job in self._queue if job.is_small or not only_small), None)
                if job is None:
                    self._changed.wait()
                    continue
                self._queue.remove(job)
                if job.is_wanted:
                    return job
                del self._jobs[job.text]
        return None

    def _run(self, text: str) -> _Outcome:
        with self._changed:
            outcome = self._look_up(text)
        if outcome is not None:  # a request with resumed tokens
            return outcome
        started = time.perf_counter()
        try:
            outcome = self._build(text)
        except TooComplex as error:
            outcome = _Refusal("too_complex", str(error))
        except GrammarError as error:
            outcome = _Refusal("invalid", str(error))
        except Exception:  # the thread must go on with other requests' grammars
            _log.exception("compiling a grammar failed")
            outcome = _Refusal("invalid", "the grammar cannot be compiled")
        self._stats.observe_compile(time.perf_counter() - started)
        return outcome

    def _end(self, job: _Compilation, outcome: _Outcome) -> list[_Waiting]:
        """Keep the outcome and return the requests that wait for it; no more will."""
        with self._changed:
            del self._jobs[job.text]
            if outcome is not _QUEUE_TIMEOUT and job.text not in self._cache:
                self._cache[job.text] = outcome
                self._cached_bytes += len(job.text)
            while len(self._cache) > CACHE_ENTRIES or self._cached_bytes > CACHE_BYTES:
                text, _ = self._cache.popitem(last=False)
                self._cached_bytes -= len(text)
        return job.waiting

    def _look_up(self, text: str) -> _Outcome | None:
        outcome = self._cache.get(text)
        if outcome is not None:
            self._cache.move_to_end(text)
        return outcome

    def _settle(self, request: EngineCoreRequest, ready: Ready, outcome: _Outcome) -> None:
        if isinstance(outcome, _Refusal):
            self._refuse(request, ready, outcome)
            return
        cursor = _make_cursor(request, outcome)
        if all(map(cursor.accept, request.resumed_token_ids)):
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


def _make_cursor(request: EngineCoreRequest, compiled: LLMatcher) -> GrammarCursor:
    params = request.sampling_params
    matcher = LLGuidanceMatcher(compiled, params.stop_token_ids, ignores_end=params.ignore_eos)
    return GrammarCursor(_grammar(request), matcher)


def _start_thread(work: Callable[[bool], None], only_small: bool) -> threading.Thread:
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, args=(only_small,), name="proa-grammar", daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
