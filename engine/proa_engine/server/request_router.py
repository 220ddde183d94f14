"""RequestRouter: passes requests to the core and each step's outputs to the streams that their requests came from.

Runs on the I/O thread, so nothing is locked. A stream is an `OutputStream`: a Session or a Generate call.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from proa.contract import EngineCoreOutput, EngineCoreRequest, LoadedLoras, SchedulerStats, hash_audio
from proa.image.limits import hash_image
from proa_engine.core.operations import EndStream, Operation
from proa_engine.core.types import PlainTokens, StepOutputs
from proa_engine.prompt_embeds import with_hashes
from proa_engine.server.claims import Claims
from proa_engine.server.errors import (
    Draining,
    EngineError,
    InvalidRequest,
    NoPrefixCache,
    NotReady,
    RequestIdInUse,
    rejection_error,
    status_code,
)
from proa_engine.server.kv_events import KvEventPublisher, KvSubscription
from proa_engine.server.loaded_engine import LoadedEngine
from proa_engine.server.pending import StreamShares

MAX_INLINE_BYTES = 256 * 1024
"""Most bytes of pixels, samples or embeddings that are hashed on the event loop, in about 0.2 ms."""

T = TypeVar("T")


async def check_media(request: EngineCoreRequest) -> None:
    """Raises `InvalidRequest` for a wrong hash, and for samples that are not finite. Many pixels, or many samples, are
    hashed on a thread."""
    if sum(len(each.data) for each in request.media) <= MAX_INLINE_BYTES:
        _check_media(request)
    else:
        await asyncio.to_thread(_check_media, request)


async def hash_embeds(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request with the hashes of its prompt embeddings. Raises `InvalidRequest` for values that are not
    finite. Many values are hashed on a thread."""
    if not request.prompt_embeds:
        return request
    try:
        if sum(len(embeds.values) for embeds in request.prompt_embeds) <= MAX_INLINE_BYTES:
            return with_hashes(request)
        return await asyncio.to_thread(with_hashes, request)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _check_media(request: EngineCoreRequest) -> None:
    for index, image in enumerate(request.images):
        if image.pixels and hash_image(image.pixels, image.height, image.width) != image.hash:
            raise InvalidRequest(f"the hash of image {index} is not that of its pixels")
    for index, audio in enumerate(request.audios):
        if audio.samples and hash_audio(audio.samples) != audio.hash:
            raise InvalidRequest(f"the hash of audio {index} is not that of its samples")
        if not np.isfinite(np.frombuffer(audio.samples, "<f4")).all():
            raise InvalidRequest(f"audio {index} has a sample that is infinite or not a number")


class OutputStream(Protocol):
    """Receives the outputs of its requests. No method blocks."""

    def deliver(self, outputs: Sequence[EngineCoreOutput], timestamp: float, step: int) -> None:
        """Take ownership of one step's outputs."""
        ...

    def deliver_plain(self, tokens: PlainTokens, timestamp: float, step: int) -> None:
        """Take one step's plain tokens, which `deliver` does not get."""
        ...

    def reject(self, request_id: str, error: EngineError) -> None: ...

    def load_changed(self) -> None:
        """The engine has fallen asleep or woken up."""
        ...

    def loras_changed(self, loaded: LoadedLoras) -> None:
        """Take all adapters that requests may name from now on."""
        ...

    def drain(self) -> None:
        """The engine admits no new requests; running ones continue."""
        ...

    def fail(self, error: EngineError) -> None:
        """End the stream: no more outputs follow."""
        ...


@dataclass(frozen=True, slots=True)
class _WithoutEngine:
    """The engine while it is loading, or after it has failed."""

    refusal: EngineError

    @property
    def loaded(self) -> LoadedEngine:
        raise self.refusal

    def admit(self) -> LoadedEngine:
        raise self.refusal

    def drain(self, refusal: EngineError) -> "_WithoutEngine":
        return _WithoutEngine(refusal)

    def on_refused(self, error: EngineError) -> None:
        pass

    def abort(self, request_ids: Sequence[str]) -> None:
        pass

    def end_stream(self, stream_id: int) -> None:
        pass

    def stats(self) -> SchedulerStats:
        return SchedulerStats()

    def num_retained_blocks(self, stream_id: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class _WithEngine:
    """A loaded engine, which admits requests."""

    loaded: LoadedEngine

    def admit(self) -> LoadedEngine:
        """Return the engine if it takes new requests. Raises EngineError."""
        return self.loaded

    def drain(self, refusal: EngineError) -> "_DrainingEngine":
        return _DrainingEngine(self.loaded, refusal)

    def on_refused(self, error: EngineError) -> None:
        """Count a request that was refused."""
        self.loaded.observer.on_refused(status_code(error).name.lower())

    def abort(self, request_ids: Sequence[str]) -> None:
        self.loaded.core.abort(request_ids)

    def end_stream(self, stream_id: int) -> None:
        self.loaded.core.operate(EndStream(stream_id))

    def stats(self) -> SchedulerStats:
        """Current statistics."""
        stats, started_at = self.loaded.core.stats(), self.loaded.core.step_started_at
        if started_at is not None:
            stats.last_step_age = max(0.0, time.monotonic() - started_at)
        return stats

    def num_retained_blocks(self, stream_id: int) -> int:
        return self.loaded.core.retention.num_blocks_of(stream_id)


@dataclass(frozen=True, slots=True)
class _DrainingEngine(_WithEngine):
    """A loaded engine that admits no new requests; running ones continue."""

    refusal: EngineError

    def admit(self) -> LoadedEngine:
        raise self.refusal


@dataclass(slots=True)
class _Stream:
    output: OutputStream
    request_ids: set[str] = field(default_factory=set)  # unfinished


class RequestRouter:
    """States: loading, serving, draining, failed. Requests are admitted only while serving."""

    def __init__(self, on_sleep: Callable[[bool], None] = lambda asleep: None) -> None:
        """`on_sleep` is called when the engine begins to sleep, and when it is awake again."""
        self._on_sleep = on_sleep
        self._engine: _WithoutEngine | _WithEngine = _WithoutEngine(NotReady("the model is still loading"))
        self._streams: dict[int, _Stream] = {}
        self._stream_ids: dict[str, int] = {}  # by request id; kept until the core finishes or rejects the request
        self._shares = StreamShares(self._stream_ids)
        self._num_streams = 0  # since the start; the last stream's id
        self._sleep_level = 0
        self.loras = LoadedLoras()  # that requests may name
        self.claims = Claims()
        self._kv_events = KvEventPublisher()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def engine(self) -> LoadedEngine:
        """The loaded engine, also while draining. Raises NotReady or EngineDead."""
        return self._engine.loaded

    def start(self, engine: LoadedEngine) -> None:
        """Admit requests, now that the model is loaded."""
        self._engine = _WithEngine(engine)
        self.loras = engine.loras

    def drain(self) -> None:
        """Admit no new requests; running ones continue."""
        refusal = Draining("the engine is shutting down")
        self._engine = self._engine.drain(refusal)
        self._kv_events.fail(refusal)
        for stream in self._streams.values():
            stream.output.drain()

    def fail(self, error: EngineError) -> None:
        """End all streams. Nothing is admitted or delivered from now on."""
        self._engine = _WithoutEngine(error)
        self._stream_ids.clear()
        self._idle.set()
        self._kv_events.fail(error)
        for stream in self._streams.values():
            stream.output.fail(error)

    async def wait_until_idle(self) -> None:
        """Wait until no request is unfinished."""
        await self._idle.wait()

    def add_stream(self, output: OutputStream) -> int:
        """Register a stream and return its id. Raises EngineError unless serving."""
        self._engine.admit()
        self._num_streams += 1
        self._streams[self._num_streams] = _Stream(output)
        return self._num_streams

    def remove_stream(self, stream_id: int) -> None:
        """Remove a stream and abort its unfinished requests."""
        self.abort(self._streams.pop(stream_id).request_ids)
        self.claims.end(stream_id)
        self._engine.end_stream(stream_id)

    def submit(self, stream_id: int, request: EngineCoreRequest) -> None:
        """Pass a stream's request to the core. Raises EngineError."""
        try:
            engine = self._admit(request)
        except EngineError as error:
            self._engine.on_refused(error)
            raise
        self._stream_ids[request.request_id] = stream_id
        self._streams[stream_id].request_ids.add(request.request_id)
        self._idle.clear()
        headers = engine.observer.on_request(request)
        engine.core.submit(replace(request, client_index=stream_id, trace_headers=headers))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests of any stream; each gets a last output. Unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._stream_ids]
        if known:
            self._engine.abort(known)

    def deliver(self, outputs: StepOutputs) -> None:
        """Route a step's outputs to their requests' streams. Takes ownership of `outputs`."""
        if isinstance(self._engine, _WithoutEngine):  # failed while this step was on its way from the main thread
            return
        observer = self._engine.loaded.observer
        observer.on_outputs(outputs)
        if outputs.sleep_level != self._sleep_level:
            self._sleep_level = outputs.sleep_level
            self._on_sleep(self._sleep_level > 0)
            for each in self._streams.values():
                each.output.load_changed()
        if outputs.loras is not None:
            self.loras = outputs.loras
            for each in self._streams.values():
                each.output.loras_changed(outputs.loras)
        for stream_id, tokens in self._shares.split(outputs.plain):
            if stream_id in self._streams:
                self._streams[stream_id].output.deliver_plain(tokens, outputs.timestamp, outputs.step)
        by_stream: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        for output in outputs.outputs:
            by_stream[output.client_index].append(output)
            if output.is_finished:
                self._forget(output.request_id)
        for stream_id, of_stream in by_stream.items():
            if stream_id in self._streams:
                self._streams[stream_id].output.deliver(of_stream, outputs.timestamp, outputs.step)
        if outputs.kv_events is not None:
            self._kv_events.deliver(outputs.kv_events)
        for rejection in outputs.rejections:
            observer.on_rejected(rejection.request_id, rejection.code, rejection.message)
            if rejection.client_index in self._streams:
                self._streams[rejection.client_index].output.reject(rejection.request_id, rejection_error(rejection))
            self._forget(rejection.request_id)

    async def operate(self, operation: Operation[T]) -> T:
        """Have the core do what an operator called for, and wait for its result. Raises EngineError, or what the
        operation says."""
        return await asyncio.wrap_future(self._engine.admit().core.operate(operation))

    def subscribe_kv_events(self) -> KvSubscription:
        """Subscribe to changes of the prefix cache. Raises EngineError."""
        engine = self._engine.admit()
        info = engine.info
        if not info.prefix_caching:
            raise NoPrefixCache("the engine runs without prefix caching")
        return self._kv_events.subscribe(engine.core, info.num_gpu_blocks + info.num_host_blocks)

    def load(self) -> SchedulerStats:
        """Current statistics; all zero before the model is loaded."""
        return self._engine.stats()

    def load_beside(self, stream_id: int) -> SchedulerStats:
        """The same, with what other streams than this one claim."""
        stats = self.load()
        self.claims.fill(stats, stream_id, self._engine.num_retained_blocks)
        return stats

    def _admit(self, request: EngineCoreRequest) -> LoadedEngine:
        engine = self._engine.admit()
        if request.request_id in self._stream_ids:
            raise RequestIdInUse(f"request_id {request.request_id!r} belongs to an unfinished request")
        try:
            engine.validate(request)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        return engine

    def _forget(self, request_id: str) -> None:
        if request_id in self._stream_ids:
            stream_id = self._stream_ids.pop(request_id)
            if stream_id in self._streams:
                self._streams[stream_id].request_ids.discard(request_id)
        if not self._stream_ids:
            self._idle.set()
