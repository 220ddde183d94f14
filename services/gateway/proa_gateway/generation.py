"""Generation: all output sequences of one HTTP request, from the choice of engines to the last token.

Every wait has a deadline; what is not ended at `close` is aborted. Knows nothing of text, JSON or HTTP.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from proa.text import TextStream
from proa_gateway.admission import Ticket
from proa_gateway.config import Deadlines
from proa_gateway.errors import EngineTimeout, GatewayError
from proa_gateway.metrics import GatewayMetrics
from proa_gateway.output_processor import Consumer, OutputProcessor
from proa_gateway.pool import EnginePool
from proa_gateway.telemetry import Attempt, RequestTrace
from proa_gateway.types import EngineRequest, RouteWish

MAX_ATTEMPTS = 3


@dataclass(slots=True, eq=False)
class _Running:
    """Where a sequence is."""

    request: EngineRequest
    wish: RouteWish
    abort: Callable[[], None] | None = None
    attempt: Attempt | None = None
    tried: list[str] = field(default_factory=list)  # addresses
    seen: int = 0  # tokens when last looked at
    since: float = 0.0  # when that number last changed, by the event loop's clock


class Generation:
    """Owns its sequences. `add` them, `start`, then `wait` until `finished`; `close` in any case."""

    def __init__(
        self,
        pool: EnginePool,
        model: str,
        *,
        ticket: Ticket,
        trace: RequestTrace,
        metrics: GatewayMetrics,
        deadlines: Deadlines,
    ) -> None:
        self._pool = pool
        self._model = model
        self._ticket = ticket
        self._trace = trace
        self._metrics = metrics
        self._deadlines = deadlines
        self._running: dict[OutputProcessor, _Running] = {}
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
        wish: RouteWish,
        stream: TextStream,
        consumer: Consumer,
        *,
        wants_tokens: bool,
    ) -> OutputProcessor:
        sequence = OutputProcessor(stream, consumer, self, wants_tokens=wants_tokens)
        self.sequences.append(sequence)
        self._running[sequence] = _Running(request, wish)
        return sequence

    def start(self) -> None:
        """Sends everything. Raises `ModelNotFound` or `EngineUnavailable`."""
        for sequence, running in self._running.items():
            self._submit(sequence, running)

    def wake(self) -> None:
        """Lets `wait` return."""
        self._woken.set()

    async def wait(self) -> None:
        """Until somebody wakes it, an end included. Raises the error of a sequence that failed, and
        `EngineTimeout`."""
        pause = min(self._deadlines.first_token, self._deadlines.next_token) / 4
        while not self._woken.is_set():
            try:
                async with asyncio.timeout(pause):
                    await self._woken.wait()
            except TimeoutError:
                self._check_progress()
        self._woken.clear()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Aborts what is still running."""
        for running in self._running.values():
            if running.abort is not None:
                running.abort()
            if running.attempt is not None:
                running.attempt.finish("aborted", "given up by the gateway")
        self._running.clear()

    # SequenceOwner

    def started(self, sequence: OutputProcessor) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self._ticket.started(len(self._running[sequence].request.prompt_token_ids))

    def ended(self, sequence: OutputProcessor) -> None:
        running = self._running.pop(sequence, None)
        if running is None:
            return
        if running.abort is not None:
            running.abort()  # means nothing to an engine that has ended it itself
        if running.attempt is not None:
            running.attempt.finish()
        self._woken.set()

    def failed(self, sequence: OutputProcessor, error: GatewayError, *, retryable: bool) -> None:
        running = self._running[sequence]
        if running.attempt is not None:
            running.attempt.finish(type(error).__name__, error.message)
            running.attempt = None
        if not (retryable and len(running.tried) < MAX_ATTEMPTS and self._retry(sequence, running)):
            self._error = self._error or error
            self._woken.set()

    # Private

    def _submit(self, sequence: OutputProcessor, running: _Running) -> None:
        with self._trace.span("route"):
            engine = self._pool.pick(self._model, running.wish, avoid=running.tried)
        running.tried.append(engine.address)
        running.attempt = self._trace.start_attempt(engine.address, len(running.tried))
        running.since = asyncio.get_running_loop().time()
        running.abort = engine.submit(replace(running.request, trace_headers=running.attempt.inject()), sequence)

    def _retry(self, sequence: OutputProcessor, running: _Running) -> bool:
        """Whether another engine has it now."""
        try:
            self._submit(sequence, running)
        except GatewayError:
            return False
        self._metrics.observe_retry()
        return True

    def _check_progress(self) -> None:
        now = asyncio.get_running_loop().time()
        for sequence, running in self._running.items():
            if sequence.num_received != running.seen:
                running.seen, running.since = sequence.num_received, now
            limit = self._deadlines.next_token if running.seen else self._deadlines.first_token
            if now - running.since > limit:
                what = "next" if running.seen else "first"
                raise EngineTimeout(f"The engine sent no {what} token within {limit:g} s.")
