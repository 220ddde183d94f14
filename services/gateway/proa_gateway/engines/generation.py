"""Generation: all output sequences of one HTTP request, from the choice of engines to the last token.

A sequence whose engine is lost goes on in another, from the tokens received; its stream notices nothing. Every wait has
a deadline; what is not ended at `close` is aborted. Knows nothing of text, JSON or HTTP.
"""

import asyncio
import logging
import random
import time
from dataclasses import replace

from proa.text import TextStream
from proa_gateway.config import Deadlines
from proa_gateway.engines.attempts import RequestAttempts
from proa_gateway.engines.deadlines import RequestDeadlines
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import EngineUnavailable, GatewayError, InternalError
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import RequestTrace
from proa_gateway.output_processor import Consumer, OutputProcessor
from proa_gateway.routing.hints import RoutingHints
from proa_gateway.types import EngineRequest

_log = logging.getLogger(__name__)


class Generation:
    """Owns its sequences. `add` them, `start`, then `wait` until `finished`; `close` in any case."""

    def __init__(
        self,
        pool: EnginePool,
        model: str,
        *,
        trace: RequestTrace,
        metrics: GatewayMetrics,
        deadlines: Deadlines,
        seconds: float,
    ) -> None:
        """`seconds`: how long all of it may take from now."""
        self._pool = pool
        self._model = model
        self._trace = trace
        self._metrics = metrics
        self._failover_seconds = deadlines.failover
        self._patience = RequestDeadlines(deadlines, self._now() + seconds)
        self._running: dict[OutputProcessor, RequestAttempts] = {}
        self._error: GatewayError | None = None
        self._woken = asyncio.Event()
        self.sequences: list[OutputProcessor] = []
        self.first_token_at: float | None = None  # `time.perf_counter`

    @property
    def finished(self) -> bool:
        return not self._running

    def add(
        self,
        request: EngineRequest,
        wish: RoutingHints,
        stream: TextStream | None,
        consumer: Consumer,
        *,
        wants_tokens: bool,
    ) -> OutputProcessor:
        """Without a `stream` the output is dropped."""
        sequence = OutputProcessor(stream, consumer, self, wants_tokens=wants_tokens)
        self.sequences.append(sequence)
        self._running[sequence] = RequestAttempts(request, wish)
        return sequence

    def start(self) -> None:
        """Sends everything. Raises `ModelNotFound` or `EngineUnavailable`."""
        for sequence, journey in self._running.items():
            self._pool.retry_budget.earn()
            journey.since = self._now()
            self._send(sequence, journey)

    def wake(self) -> None:
        """Lets `wait` return."""
        self._woken.set()

    async def wait(self) -> None:
        """Until somebody wakes it, an end included. Raises the error of a sequence that failed, `EngineTimeout` and
        `DeadlineExceeded`."""
        self._check_progress()
        while not self._woken.is_set():
            try:
                async with asyncio.timeout(self._patience.until_next_check(self._now())):
                    await self._woken.wait()
            except TimeoutError:
                self._check_progress()
        self._woken.clear()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Aborts what is still running."""
        for journey in self._running.values():
            if journey.moving is not None:
                journey.moving.cancel()
            if journey.abort is not None:
                journey.abort()
            if journey.attempt is not None:
                journey.attempt.finish("aborted", "given up by the gateway")
        self._running.clear()

    # SequenceOwner

    def started(self, sequence: OutputProcessor) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        journey = self._running[sequence]
        self._metrics.observe_cache_hit(expected=journey.num_cached_tokens, reported=sequence.num_cached_tokens)

    def ended(self, sequence: OutputProcessor) -> None:
        journey = self._running.pop(sequence, None)
        if journey is None:
            return
        if journey.abort is not None:
            journey.abort()  # means nothing to an engine that has ended it itself
        if journey.attempt is not None:
            journey.attempt.finish()
        self._woken.set()

    def failed(self, sequence: OutputProcessor, error: GatewayError, *, retryable: bool) -> None:
        journey = self._running[sequence]
        if journey.attempt is not None:
            journey.attempt.finish(type(error).__name__, error.message)
        journey.attempt = journey.abort = None
        now = self._now()
        journey.progressed(len(sequence.received), now)
        pause = journey.failed(error, now, self._pool.retry_budget, random.random()) if retryable else None
        if pause is None:
            self._give_up(journey, error)
        else:
            journey.moving = asyncio.create_task(self._move(sequence, journey, error, pause))

    # Private

    def _send(self, sequence: OutputProcessor, journey: RequestAttempts) -> None:
        """To an engine not tried yet while there is one. Raises `ModelNotFound` or `EngineUnavailable`."""
        unfit = journey.unfit(self._pool.engines)
        with self._trace.span("route") as span:
            try:
                pick = self._pool.pick(self._model, journey.wish, avoid=[*journey.tried, *unfit])
            except EngineUnavailable:
                if not journey.tried:
                    raise
                pick = self._pool.pick(self._model, journey.wish, avoid=unfit)
            span.set_attributes(pick.to_attributes())
        engine, journey.num_cached_tokens = pick.engine, pick.num_cached_tokens
        attempt = self._trace.start_attempt(engine.address, journey.num_attempts + 1)
        request = replace(journey.next_request(sequence.received), trace_headers=attempt.inject())
        journey.attempt, journey.abort = attempt, engine.submit(request, sequence)
        journey.sent(engine)

    async def _move(
        self, sequence: OutputProcessor, journey: RequestAttempts, error: GatewayError, pause: float
    ) -> None:
        """Sends it again as soon as an engine can take it; where none comes in time, the error stands."""
        try:
            await asyncio.sleep(pause)
            await self._send_in_time(sequence, journey)
        except GatewayError:
            self._give_up(journey, error)
        except Exception:
            _log.exception("a request could not be sent again")
            self._give_up(journey, InternalError("the gateway failed while sending the request again"))
        else:
            self._tell_moved(journey)

    async def _send_in_time(self, sequence: OutputProcessor, journey: RequestAttempts) -> None:
        """Waits for an engine while there is one to hope for. Raises what `_send` raises."""
        assert journey.failed_at is not None
        ends_at = journey.failed_at + self._failover_seconds
        while True:
            try:
                self._send(sequence, journey)
            except EngineUnavailable:
                unfit, lost = journey.unfit(self._pool.engines), journey.tried[-1:]
                await self._pool.wait_for(self._model, ends_at - self._now(), avoid=unfit, lost=lost)
            else:
                return

    def _tell_moved(self, journey: RequestAttempts) -> None:
        if not journey.num_received:
            self._metrics.observe_retry()
            return
        self._metrics.observe_failover("resumed")
        where, how_far = journey.tried[-1], journey.num_received
        attributes: dict[str, str | int] = {"proa.engine": where, "proa.resumed_tokens": how_far}
        self._trace.add_event("failover", **attributes)

    def _give_up(self, journey: RequestAttempts, error: GatewayError) -> None:
        if journey.num_received:
            self._metrics.observe_failover("given_up")
        self._error = self._error or journey.loss or error
        self._woken.set()

    def _check_progress(self) -> None:
        now = self._now()
        for sequence, journey in self._running.items():
            journey.progressed(len(sequence.received), now)
        self._patience.check(self._running.values(), now)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
