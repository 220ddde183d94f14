"""Generation: runs all engine requests of one HTTP request, from routing to the last output.

If an engine is lost, another one continues its sequences after the tokens received so far, and computes its pooled
requests again.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from proa.contract import EngineCoreRequest, Lora
from proa_gateway.config import Deadlines
from proa_gateway.engines.attempts import RequestAttempts, RequestDeadlines
from proa_gateway.engines.client import EngineClient
from proa_gateway.engines.models import LoraRegistry
from proa_gateway.engines.pool import EnginePool, Pick
from proa_gateway.engines.session import OutputSink
from proa_gateway.errors import EngineUnavailable, GatewayError, InternalError, LoraNotFound, LoraNotLoaded
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import RequestTrace
from proa_gateway.output.text import EngineSequence
from proa_gateway.routing.policies import RoutingHints

_log = logging.getLogger(__name__)


class Generation:
    """The `SequenceListener` of its sequences. Call `add` for each, `start`, then `wait` until `finished`; always
    `close`, which aborts the rest. More may be added and started later."""

    def __init__(
        self,
        pool: EnginePool,
        model: str,
        loras: LoraRegistry,
        *,
        trace: RequestTrace,
        metrics: GatewayMetrics,
        deadlines: Deadlines,
        seconds: float,
    ) -> None:
        """`model`: the engines'. `seconds`: time from now in which all sequences must finish."""
        self._pool = pool
        self._loras = loras
        self._model = model
        self._trace = trace
        self._metrics = metrics
        self._failover_timeout = deadlines.failover
        self._now = asyncio.get_running_loop().time  # the event loop's clock
        self._deadlines = RequestDeadlines(deadlines, self._now() + seconds)
        self._running: dict[EngineSequence, RequestAttempts] = {}  # the sequences that have not ended
        self._unsent: list[EngineSequence] = []  # those that were added since the last `start`
        self._has_started = False
        self._wake = asyncio.Event()  # makes `wait` return
        self.error: GatewayError | None = None  # which ended it; `wait` raises it
        self.first_token_at: float | None = None  # or first pooled output, by `time.perf_counter`

    @property
    def finished(self) -> bool:
        return not self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence: EngineSequence, request: EngineCoreRequest, hints: RoutingHints) -> None:
        self._unsent.append(sequence)
        self._running[sequence] = RequestAttempts(request, hints)

    def start(self) -> None:
        """Send the sequences that have been added to engines. Raises `ModelNotFound` or `EngineUnavailable` if none has
        been sent yet; later ones wait for an engine as after a failure."""
        is_first, self._has_started = not self._has_started, True
        unsent, self._unsent = self._unsent, []
        for sequence in unsent:
            attempts = self._running[sequence]
            self._pool.retry_budget.add_request()
            attempts.last_progress = self._now()
            try:
                pick = self._pick(attempts)
                if attempts.hints.lora is None or attempts.is_loaded(pick.engine):
                    self._send(sequence, attempts, pick)
                else:
                    # Now, so that the next requests are sent there too.
                    self._begin_load(attempts.hints.lora, pick.engine)
                    self._start_task(attempts, partial(self._load_and_send, sequence, attempts, pick))
            except EngineUnavailable as error:
                if is_first:
                    raise
                self.failed(sequence, error, retryable=True)

    def wake(self) -> None:
        """Make `wait` return."""
        self._wake.set()

    async def wait(self) -> None:
        """Wait until `wake` is called or a sequence ends.

        Raises `error`: that of a sequence that failed, `EngineTimeout` or `DeadlineExceeded`.
        """
        while True:
            now = self._now()
            for sequence, attempts in self._running.items():
                attempts.update_progress(len(sequence.received), now)
            self.error = self._deadlines.error(self._running.values(), now) or self.error
            if self.error is not None or self._wake.is_set():
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(self._deadlines.until_next_check(now)):
                    await self._wake.wait()
                    break
        self._wake.clear()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Abort all sequences that have not ended."""
        for sequence, attempts in self._running.items():
            attempts.cancel(sequence.received)
        self._running.clear()

    # SequenceListener

    def started(self, sequence: EngineSequence) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        attempts = self._running[sequence]
        self._metrics.observe_cache_hit(expected=attempts.num_cached_tokens, reported=sequence.num_cached_tokens)

    def ended(self, sequence: EngineSequence) -> None:
        attempts = self._running.pop(sequence, None)
        if attempts is None:
            return
        if attempts.sent is not None:
            attempts.sent.abort()  # no-op unless the sequence was cut at a stop string
        if attempts.turn is not None:
            attempts.turn.end(sequence.received)
        if attempts.span is not None:
            attempts.span.finish()
        self._wake.set()

    def draining(self, sequence: EngineSequence) -> None:
        """Move the sequence to another engine, if one can fetch its blocks; else it stays where it is."""
        attempts, exchange = self._running[sequence], self._pool.exchange
        attempts.update_progress(len(sequence.received), self._now())
        successors = exchange.successors(attempts)
        if not successors:
            return
        avoid = [engine.address for engine in self._pool.engines if engine not in successors]
        try:
            pick = self._pool.pick(self._model, attempts.hints, avoid=[*avoid, *attempts.incompatible(successors)])
        except EngineUnavailable:
            return
        attempts.leave()
        if attempts.turn is not None:
            attempts.turn.end(sequence.received)
        try:
            self._send(sequence, attempts, pick)
        except EngineUnavailable as error:
            attempts.record_not_sent(pick.engine)
            self.failed(sequence, error, retryable=True)
            return
        if attempts.fetching is None:  # the engine that drains is gone
            attempts.end_fetch()
        self._metrics.observe_move("drain")
        num_resumed = attempts.num_received
        self._trace.add_event("moved", {"proa.engine": pick.engine.address, "proa.resumed_tokens": num_resumed})

    def failed(self, sequence: EngineSequence, error: GatewayError, *, retryable: bool) -> None:
        attempts = self._running[sequence]
        if attempts.span is not None:
            attempts.span.finish(type(error).__name__, error.message)
        attempts.span = attempts.sent = None
        if attempts.turn is not None:
            attempts.turn.end(sequence.received)
        attempts.end_fetch()
        now = self._now()
        attempts.update_progress(len(sequence.received), now)
        delay = attempts.record_failure(error, now, self._pool.retry_budget, random.random()) if retryable else None
        if delay is None:
            self._give_up(attempts, error)
        else:
            self._start_task(attempts, partial(self._resend, sequence, attempts, error, delay))

    # Private

    def _start_task(self, attempts: RequestAttempts, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await work()
            except Exception:
                _log.exception("sending failed: request %s", attempts.request.request_id)
                self._give_up(attempts, InternalError("the gateway failed while sending the request"))

        attempts.resend_task = asyncio.create_task(run())

    def _pick(self, attempts: RequestAttempts) -> Pick:
        """Choose an engine, one not tried yet if possible. Raises `ModelNotFound` or `EngineUnavailable`."""
        incompatible = attempts.incompatible(self._pool.engines)
        with self._trace.span("route") as span:
            try:
                pick = self._pool.pick(self._model, attempts.hints, avoid=[*attempts.tried, *incompatible])
            except EngineUnavailable:
                if not attempts.tried:
                    raise
                pick = self._pool.pick(self._model, attempts.hints, avoid=incompatible)
            if span.is_recording():
                span.set_attributes(pick.span_attributes())
        return pick

    def _send(self, sequence: EngineSequence, attempts: RequestAttempts, pick: Pick) -> None:
        """Raises `EngineUnavailable` if the engine's session has ended."""
        engine, attempts.num_cached_tokens = pick.engine, pick.num_cached_tokens
        attempts.span = self._trace.start_attempt(engine.address, attempts.num_attempts + 1)
        request = replace(attempts.next_request(sequence.received), trace_headers=attempts.span.headers())
        sink: OutputSink = sequence
        fetching = self._pool.exchange.begin(engine, request, attempts, sequence, self._trace)
        if fetching is not None:
            sink, request = fetching, replace(request, kv_source=fetching.source)
        attempts.fetching = fetching
        if (sessions := engine.sessions) is not None and (
            turn := self._pool.begin_turn(sessions, self._model, request, attempts.hints, attempts.turn)
        ):
            attempts.turn = turn
            if turn.retain or turn.released:  # not for a first turn, mostly: a copy takes longer than all of its table
                request = replace(request, retain=turn.retain, released=turn.released)
        attempts.sent = engine.submit(request, sink)
        attempts.record_sent(engine)

    async def _load_and_send(self, sequence: EngineSequence, attempts: RequestAttempts, pick: Pick) -> None:
        """Send to the engine as soon as it has the request's adapter. The sequence fails if it does not get it."""
        try:
            if (lora := attempts.hints.lora) is not None and not attempts.is_loaded(pick.engine):
                await self._load(attempts, lora, pick.engine)
            self._send(sequence, attempts, pick)
        except GatewayError as error:
            attempts.record_not_sent(pick.engine)
            self.failed(sequence, error, retryable=True)

    def _begin_load(self, lora: Lora, engine: EngineClient) -> None:
        if (known := self._loras.get(lora.name)) is not None and engine.loras.get(known.lora) is None:
            engine.begin_load_lora(known.lora, replace=True)

    async def _load(self, attempts: RequestAttempts, lora: Lora, engine: EngineClient) -> None:
        """Raises `LoraNotLoaded`, also if only other content than that of the first tokens can be loaded."""
        known = self._loras.get(lora.name)
        if known is None:
            raise LoraNotFound(f"The model {lora.name!r} does not exist.", param="model")
        if attempts.num_received and known.lora.digest != lora.digest:
            raise LoraNotLoaded(f"The adapter {lora.name!r} was replaced.")
        loaded = engine.loras.get(known.lora)
        if loaded is None:
            with self._trace.span("load_lora"):
                loaded = await engine.load_lora(known.lora, replace=True)
        if not attempts.num_received:
            attempts.set_lora(loaded)
        elif loaded.digest != lora.digest:
            raise LoraNotLoaded(f"Engine {engine.address} loaded another content of the adapter {lora.name!r}.")

    async def _resend(
        self, sequence: EngineSequence, attempts: RequestAttempts, error: GatewayError, delay: float
    ) -> None:
        """Send the sequence again after `delay` seconds. If no engine is ready in time it fails with `error`."""
        await asyncio.sleep(delay)
        try:
            pick = await self._pick_when_ready(attempts)
        except GatewayError:
            self._give_up(attempts, error)
            return
        num_before = attempts.num_attempts
        await self._load_and_send(sequence, attempts, pick)
        if attempts.num_attempts == num_before:
            return
        if not attempts.num_received:
            self._metrics.observe_retry()
            return
        self._metrics.observe_failover("resumed")
        engine, num_resumed = attempts.tried[-1], attempts.num_received
        self._pool.failovers.record_resumed(attempts.tried[0], engine)
        self._trace.add_event("failover", {"proa.engine": engine, "proa.resumed_tokens": num_resumed})

    async def _pick_when_ready(self, attempts: RequestAttempts) -> Pick:
        """Choose an engine as soon as one is ready, within the failover timeout. Raises what `_pick` raises."""
        assert attempts.failed_at is not None
        ends_at = attempts.failed_at + self._failover_timeout
        while True:
            try:
                return self._pick(attempts)
            except EngineUnavailable:
                incompatible, lost = attempts.incompatible(self._pool.engines), attempts.tried[-1:]
                await self._pool.wait_for(self._model, ends_at - self._now(), avoid=incompatible, lost=lost)

    def _give_up(self, attempts: RequestAttempts, error: GatewayError) -> None:
        error = attempts.lost_error or error
        if attempts.num_received:
            self._metrics.observe_failover("given_up")
            self._pool.failovers.record_given_up(attempts.tried[0], error.message)
        self.error = self.error or error
        self._wake.set()
