"""Session: one open gRPC session with one engine, and the sinks of the requests on it.

Outputs go to their sinks in the task that reads them: no queue or task switch between a step's message and the HTTP
streams.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import grpc

from proa.contract import (
    Audio,
    Draining,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Image,
    LoadedLoras,
    Rejected,
    SchedulerStats,
    SessionClaim,
)
from proa_gateway.engines import convert
from proa_gateway.engines.discovery import describe_error
from proa_gateway.engines.engine_loras import EngineLoras
from proa_gateway.errors import (
    EngineLost,
    EngineUnavailable,
    GatewayError,
    InternalError,
    InvalidRequest,
    LoraNotLoaded,
    Overloaded,
)

ENGINE_BYTES = 2**30
"""Pixels and samples that an engine keeps: the default of its --mm-processor-cache-gb. One that keeps fewer, or has
dropped some for those of other gateways, rejects a request without them."""
MIN_BYTES = 2**16
"""That an image or an audio counts at least, so that their number is bounded too."""
BATCH_TOKENS = 64
"""Tokens delivered before control returns to the event loop: about 0.5 ms."""
_REJECTIONS: dict[int, type[GatewayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: InvalidRequest,
    grpc.StatusCode.NOT_FOUND.value[0]: LoraNotLoaded,
    grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]: Overloaded,
}


class SentMedia:
    """The last images and audios up to `max_bytes` of pixels and samples, by their hash."""

    def __init__(self, max_bytes: int = ENGINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0  # sum of `_sizes`
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the last one was used last

    def strip(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """What to send: the request, without pixels and samples that the engine has. It has all of them then."""
        images = tuple(replace(each, pixels=b"") if self._add(each) else each for each in request.images)
        audios = tuple(replace(each, samples=b"") if self._add(each) else each for each in request.audios)
        return replace(request, images=images, audios=audios)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """The engine does not have them."""
        for hash in hashes:
            self._num_bytes -= self._sizes.pop(hash, 0)

    def _add(self, media: Image | Audio) -> bool:
        """An image or an audio is sent, whole unless it was sent before. Return whether it was."""
        if media.hash in self._sizes:
            self._sizes.move_to_end(media.hash)
            return True
        data = media.pixels if isinstance(media, Image) else media.samples
        self._sizes[media.hash] = size = max(MIN_BYTES, len(data))
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, size = self._sizes.popitem(last=False)
            self._num_bytes -= size
        return False


_log = logging.getLogger(__name__)


class OutputSink(Protocol):
    """Receives the outputs of one request. Methods must not block; none is called after the last output or `failed`."""

    def token(self, token_id: int) -> None:
        """One token without logprobs or finish reason: the common case, without an object for it."""

    def output(self, output: EngineCoreOutput) -> None: ...

    def draining(self) -> None:
        """The engine will shut down. It goes on with the request as long as its drain timeout lets it."""

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        """The engine does not continue the request. `retryable`: another engine may."""


class _IgnoredOutputs:
    def token(self, token_id: int) -> None:
        pass

    def output(self, output: EngineCoreOutput) -> None:
        pass

    def draining(self) -> None:
        pass

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class SentRequest:
    """A request that was sent to an engine. After either method its sink is not called again."""

    session: "Session"
    handle: int  # names the request in its session

    def abort(self) -> None:
        self.session.abort(self.handle)

    def ignore(self) -> None:
        """Let the engine go on with the request, but drop its outputs."""
        self.session.ignore(self.handle)


class SessionListener(Protocol):
    """Is notified of the engine's own state."""

    def on_stats(self, stats: SchedulerStats) -> None: ...

    def on_draining(self) -> None: ...

    def on_success(self) -> None:
        """The engine started or ended an output, also one that ended with an error of its request."""

    def on_failure(self) -> None:
        """The engine rejected a request as unavailable."""


class Session:
    """`run` reads and writes until the stream ends; then `close` fails the requests that are left."""

    def __init__(
        self, call: convert.SessionCall, listener: SessionListener, loras: EngineLoras, *, heartbeat: float
    ) -> None:
        """`loras`: the engine's, kept up to date. `heartbeat`: longest time between two messages of the engine, in
        seconds."""
        self._call = call
        self._listener = listener
        self._loras = loras
        self._heartbeat = heartbeat
        self._sinks: dict[int, OutputSink] = {}  # by handle
        self._lora_names: dict[int, str] = {}  # by handle, of requests with an adapter
        self._sent_media = SentMedia()  # what the engine should have kept
        self._with_media: dict[int, EngineCoreRequest] = {}  # by handle, whole; none that was sent twice
        self._last_handle = 0  # handles count up from 1
        self._to_add: dict[int, convert.SessionRequest] = {}  # not written yet, by handle
        self._to_abort: list[int] = []  # handles, not written yet
        self._to_claim: SessionClaim | None = None  # not written yet
        self._wake = asyncio.Event()  # there is something to write
        self._last_message_at = asyncio.get_running_loop().time()  # by the event loop's clock

    @property
    def num_unfinished(self) -> int:
        return len(self._sinks)

    @property
    def silence(self) -> float:
        """Seconds since the engine's last message."""
        return asyncio.get_running_loop().time() - self._last_message_at

    def submit(self, request: EngineCoreRequest, sink: OutputSink) -> SentRequest:
        """Queue the request for the next write, without the pixels and samples that the engine has."""
        self._last_handle += 1
        handle = self._last_handle
        self._sinks[handle] = sink
        if request.lora_name:
            self._lora_names[handle] = request.lora_name
            self._loras.count_request(request.lora_name)
        if request.images or request.audios:
            self._with_media[handle] = request
            request = self._sent_media.strip(request)
        self._to_add[handle] = convert.add_to_pb(handle, request)
        self._wake.set()
        return SentRequest(self, handle)

    def abort(self, handle: int) -> None:
        """Abort a request with the next write. Its sink is not called again. Unknown handles are ignored."""
        if self._remove(handle) is not None and self._to_add.pop(handle, None) is None:
            self._to_abort.append(handle)
            self._wake.set()

    def claim(self, claim: SessionClaim) -> None:
        """Tell the engine what is claimed, with the next write."""
        self._to_claim = claim
        self._wake.set()

    def ignore(self, handle: int) -> None:
        """Drop the outputs of a request. Unknown handles are ignored."""
        if handle in self._sinks:
            self._sinks[handle] = _IgnoredOutputs()

    async def run(self) -> str:
        """Run until the stream ends or the heartbeat is missed. Return why; then call `close`."""
        reason = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._watch_heartbeat())
                await self._read()
                raise _SessionEnded("the engine closed the session")
        except* (grpc.aio.AioRpcError, asyncio.InvalidStateError, _SessionEnded) as group:
            reason = describe_error(group.exceptions[0])
        return reason

    def close(self, reason: str) -> None:
        """Fail all unfinished requests with `EngineLost`."""
        sinks, self._sinks = self._sinks, {}
        self._lora_names.clear()
        self._with_media.clear()
        for sink in sinks.values():
            sink.failed(EngineLost(f"the engine was lost: {reason}"), retryable=True)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while (message := await convert.read_session(self._call)) is not None:
            self._last_message_at = loop.time()
            match message:
                case EngineCoreOutputs() as step:
                    await self._deliver(step)
                case Rejected() as rejected:
                    self._reject(rejected)
                case Draining():
                    self._listener.on_draining()
                    self._tell_draining()
                case LoadedLoras() as loaded:
                    self._loras.update(loaded)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._to_abort:
                handles, self._to_abort = self._to_abort, []
                await self._call.write(convert.abort_to_pb(handles))
            if (claim := self._to_claim) is not None:
                self._to_claim = None
                await self._call.write(convert.claim_to_pb(claim))
            while self._to_add:
                handle = next(iter(self._to_add))
                await self._call.write(self._to_add.pop(handle))

    async def _watch_heartbeat(self) -> None:
        """End the session if the engine hangs. (HTTP/2 pings find a dead connection sooner, but gRPC answers them.)"""
        loop = asyncio.get_running_loop()
        period = self._heartbeat / 5
        while True:
            before = loop.time()
            await asyncio.sleep(period)
            now = loop.time()
            if now - before > 2 * period:  # this process was blocked: messages may be unread
                self._last_message_at = now
            if now - self._last_message_at > self._heartbeat:
                raise _SessionEnded(f"no message for {now - self._last_message_at:.1f} s")

    async def _deliver(self, step: EngineCoreOutputs) -> None:
        sinks = self._sinks
        handles, token_ids = step.plain_handles, step.plain_token_ids
        for start in range(0, len(handles), BATCH_TOKENS):
            if start:
                await asyncio.sleep(0)
            end = start + BATCH_TOKENS
            for handle, token_id in zip(handles[start:end], token_ids[start:end], strict=True):
                sink = sinks.get(handle)
                if sink is not None:
                    try:
                        sink.token(token_id)
                    except Exception:
                        self._drop(handle, sink)
        for start in range(0, len(step.outputs), BATCH_TOKENS):
            if start or handles:
                await asyncio.sleep(0)
            for output in step.outputs[start : start + BATCH_TOKENS]:
                self._deliver_output(output)
        if step.stats is not None:
            self._listener.on_stats(step.stats)  # last, so that requests that ended in this step are not counted

    def _deliver_output(self, output: EngineCoreOutput) -> None:
        handle = output.handle
        sink = self._sinks.get(handle)
        if sink is None:
            return
        if output.is_finished:
            self._remove(handle)
        self._listener.on_success()
        try:
            sink.output(output)
        except Exception:
            self._drop(handle, sink)

    def _tell_draining(self) -> None:
        for handle, sink in list(self._sinks.items()):
            try:
                sink.draining()
            except Exception:
                self._drop(handle, sink)

    def _drop(self, handle: int, sink: OutputSink) -> None:
        """Fail one request after an exception in its sink; the others continue."""
        _log.exception("output processing failed")
        self.abort(handle)
        sink.failed(InternalError("the gateway failed while handling the output"), retryable=False)

    def _remove(self, handle: int) -> OutputSink | None:
        """Forget a request that has ended. Return its sink; None if the handle is unknown."""
        lora_name = self._lora_names.pop(handle, None)
        if lora_name is not None:
            self._loras.uncount_request(lora_name)
        self._with_media.pop(handle, None)
        return self._sinks.pop(handle, None)

    def _reject(self, rejected: Rejected) -> None:
        if (missing := [*rejected.missing_images, *rejected.missing_audios]) and self._send_whole(rejected, missing):
            return
        lora_name = self._lora_names.get(rejected.handle)
        sink = self._remove(rejected.handle)
        if sink is not None:
            error = _REJECTIONS.get(rejected.code, EngineUnavailable)(rejected.message)
            if isinstance(error, LoraNotLoaded) and lora_name is not None:
                self._loras.drop(lora_name)
            if isinstance(error, EngineUnavailable):
                self._listener.on_failure()  # not for a full queue or an invalid request: the engine is healthy
            sink.failed(error, retryable=rejected.retryable)

    def _send_whole(self, rejected: Rejected, missing: Iterable[bytes]) -> bool:
        """Send the request again with all pixels and samples, once: the engine has not kept those with the hashes
        `missing`. Return whether it was."""
        self._sent_media.forget(missing)
        request = self._with_media.pop(rejected.handle, None)
        if request is None:
            return False
        self._sent_media.strip(request)  # all are sent
        self._to_add[rejected.handle] = convert.add_to_pb(rejected.handle, request)
        self._wake.set()
        return True


class _SessionEnded(Exception):
    """The message is the reason."""
