"""Session: one open stream with one engine, and who waits for what on it.

Outputs are handed to their sinks as they are read, in the reader's own turn: no queue and no task stands between a
step's message and the streams that it feeds. Knows nothing of text, HTTP or other engines.
"""

import asyncio
import logging
from typing import Protocol

import grpc

from proa_gateway.engines import convert
from proa_gateway.errors import EngineLost, EngineUnavailable, GatewayError, InternalError, InvalidRequest, Overloaded
from proa_gateway.types import Draining, EngineOutput, EngineRequest, EngineStats, FinishReason, Rejected, StepOutputs

# Tokens worked off before the event loop gets a turn: about half a millisecond.
SLICE = 64
_INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT.value[0]
_RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
_log = logging.getLogger(__name__)


class OutputSink(Protocol):
    """Where the outputs of one request go. Calls must return at once; after the last output or `failed` none come."""

    def token(self, token_id: int) -> None:
        """One token, and nothing else to say."""

    def output(self, output: EngineOutput) -> None: ...

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        """The engine will not go on. `retryable`: another engine may. What was received so far stays received."""


class SessionListener(Protocol):
    """Who wants to know what an engine says of itself."""

    def stats(self, stats: EngineStats) -> None: ...

    def draining(self) -> None: ...

    def answered(self) -> None:
        """It began or ended an output as it should."""

    def faulted(self) -> None:
        """It failed or turned away a request that is not to blame for it."""


class Session:
    """Owns its sinks from `submit` to their end. `run` reads and writes until the stream is lost."""

    def __init__(self, call: convert.SessionCall, listener: SessionListener, *, heartbeat: float) -> None:
        self._call = call
        self._listener = listener
        self._heartbeat = heartbeat
        self._sinks: dict[int, OutputSink] = {}
        self._last_handle = 0
        self._to_add: dict[int, convert.SessionRequest] = {}  # not written yet, by handle
        self._to_abort: list[int] = []
        self._wake = asyncio.Event()
        self._heard = asyncio.get_running_loop().time()

    @property
    def num_unfinished(self) -> int:
        return len(self._sinks)

    @property
    def silence(self) -> float:
        """Seconds since the engine last said something."""
        return asyncio.get_running_loop().time() - self._heard

    def submit(self, request: EngineRequest, sink: OutputSink) -> int:
        """Sends the request with the next write and returns its handle."""
        self._last_handle += 1
        self._sinks[self._last_handle] = sink
        self._to_add[self._last_handle] = convert.add_to_pb(self._last_handle, request)
        self._wake.set()
        return self._last_handle

    def abort(self, handle: int) -> None:
        """Ends a request with the next write; its sink hears nothing more. Ended ones are ignored."""
        if self._sinks.pop(handle, None) is not None and self._to_add.pop(handle, None) is None:
            self._to_abort.append(handle)
            self._wake.set()

    async def run(self) -> str:
        """Until the stream ends or falls silent; returns why. Whoever still waits then is told so by `close`."""
        reason = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._watch())
                await self._read()
                raise _Ended("the engine closed the session")
        except* (grpc.aio.AioRpcError, asyncio.InvalidStateError, _Ended) as group:
            reason = describe(group.exceptions[0])
        return reason

    def close(self, reason: str) -> None:
        """Tells every sink that the engine is lost."""
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.failed(EngineLost(f"the engine was lost: {reason}"), retryable=True)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while (message := await convert.read_session(self._call)) is not None:
            self._heard = loop.time()
            match message:
                case StepOutputs() as step:
                    await self._deliver(step)
                case Rejected() as rejected:
                    self._reject(rejected)
                case Draining():
                    self._listener.draining()

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._to_abort:
                handles, self._to_abort = self._to_abort, []
                await self._call.write(convert.abort_to_pb(handles))
            while self._to_add:
                handle = next(iter(self._to_add))
                await self._call.write(self._to_add.pop(handle))

    async def _watch(self) -> None:
        """An engine that says nothing for so long hangs, though its connection lives: a dead one is given away by
        HTTP/2's pings long before. But while this process itself was held up, nobody was listening."""
        loop = asyncio.get_running_loop()
        period = self._heartbeat / 5
        while True:
            before = loop.time()
            await asyncio.sleep(period)
            now = loop.time()
            if now - before > 2 * period:
                self._heard = now
            if now - self._heard > self._heartbeat:
                raise _Ended(f"no sign of life for {now - self._heard:.1f} s")

    async def _deliver(self, step: StepOutputs) -> None:
        sinks = self._sinks
        handles, token_ids = step.plain_handles, step.plain_token_ids
        for start in range(0, len(handles), SLICE):
            if start:
                await asyncio.sleep(0)
            for handle, token_id in zip(handles[start : start + SLICE], token_ids[start : start + SLICE], strict=True):
                sink = sinks.get(handle)
                if sink is not None:
                    try:
                        sink.token(token_id)
                    except Exception:
                        self._drop(handle, sink)
        for start in range(0, len(step.outputs), SLICE):
            if start or handles:
                await asyncio.sleep(0)
            for handle, output in step.outputs[start : start + SLICE]:
                self._deliver_output(handle, output)
        if step.stats is not None:
            self._listener.stats(step.stats)  # after the outputs: who has ended is not counted any more

    def _deliver_output(self, handle: int, output: EngineOutput) -> None:
        sink = self._sinks.get(handle)
        if sink is None:
            return
        if output.finish_reason is not None:
            del self._sinks[handle]
        if output.finish_reason is FinishReason.ERROR:
            self._listener.faulted()
        else:
            self._listener.answered()
        try:
            sink.output(output)
        except Exception:
            self._drop(handle, sink)

    def _drop(self, handle: int, sink: OutputSink) -> None:
        """One request's fault must not end the others'."""
        _log.exception("a request's outputs could not be handled")
        self.abort(handle)
        sink.failed(InternalError("the gateway failed while handling the output"), retryable=False)

    def _reject(self, rejected: Rejected) -> None:
        sink = self._sinks.pop(rejected.handle, None)
        if sink is not None:
            error = _error_from_rejected(rejected)
            if isinstance(error, EngineUnavailable):
                self._listener.faulted()  # one that is full is well, and one that says no to nonsense even more so
            sink.failed(error, retryable=rejected.retryable)


class _Ended(Exception):
    """The session is over; says why."""


def _error_from_rejected(rejected: Rejected) -> GatewayError:
    if rejected.code == _INVALID_ARGUMENT:
        return InvalidRequest(rejected.message)
    if rejected.code == _RESOURCE_EXHAUSTED:
        return Overloaded(rejected.message)
    return EngineUnavailable(rejected.message)


def describe(error: BaseException) -> str:
    """A sentence's worth of what went wrong with a connection."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
