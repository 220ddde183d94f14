"""Session: one gateway's bidirectional stream. Adds and aborts come in, one message a step goes out.

While the gateway does not read, later steps merge into one pending message; over 8 MiB the session is closed. A slow
gateway therefore costs memory and never delays a step.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from proa.contract import EngineCoreOutput, EngineCoreRequest, Hello, LoadedLoras, SessionClaim
from proa.logs import with_fields
from proa_engine.core.types import PlainTokens
from proa_engine.server import convert
from proa_engine.server.errors import EngineError, InvalidRequest, SlowReader
from proa_engine.server.pending import HandleColumn, PendingOutputs
from proa_engine.server.request_router import RequestRouter, check_media, hash_embeds

MAX_PENDING_BYTES = 64 * 1024 * 1024  # in memory, without pooled values
MAX_PENDING_POOLED_BYTES = 256 * 1024 * 1024  # a gateway asks for up to 64 MiB at once, also in one output
CONTROL_BYTES = 256  # estimated size of a control message
HEARTBEAT_SECONDS = 0.4  # the contract promises statistics every 500 ms

_log = logging.getLogger(__name__)


class Session:
    """An output stream whose requests are named by handles."""

    def __init__(
        self,
        router: RequestRouter,
        on_open: Callable[[], None],
        *,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        max_pending_pooled_bytes: int = MAX_PENDING_POOLED_BYTES,
    ) -> None:
        self._router = router
        self._on_open = on_open
        self._max_pending_bytes = max_pending_bytes
        self._max_pending_pooled_bytes = max_pending_pooled_bytes
        self._stream_id = 0
        self._handles: dict[str, int] = {}  # request_id -> handle, of unfinished requests
        self._request_ids: dict[int, str] = {}  # handle -> request_id
        self._column = HandleColumn((), {})  # of the last plain tokens
        self._pending = PendingOutputs()
        # Rejected, Draining and LoadedLoras, sent before pending outputs.
        self._control: deque[convert.SessionResponse] = deque()
        self._timestamp = 0.0
        self._step = 0
        self._wake = asyncio.Event()
        self._heartbeat_due = False
        self._draining = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(
        self,
        messages: AsyncIterator[convert.SessionRequest | None],
        write: Callable[[convert.SessionResponse], Awaitable[None]],
    ) -> None:
        """Serve until the gateway closes the stream, or the engine drains and the session's last request has ended.

        Raises EngineError if the session fails. Its unfinished requests are aborted in every case.
        """
        opening = convert.session_message_from_pb(await anext(messages, None), now=0.0, vocab_size=0)
        if not isinstance(opening, convert.Open):
            raise InvalidRequest("the first message of a session must be open")
        self._stream_id = self._router.add_stream(self)
        gateway = with_fields(gateway=opening.client_id)
        _log.info("gateway connected: %r", opening.client_id, extra=gateway)
        self._on_open()
        try:
            engine = self._router.engine
            stats = self._router.load_beside(self._stream_id)
            hello = Hello(instance_id=engine.instance_id, model=engine.info, stats=stats, loras=self._router.loras)
            await write(convert.hello_to_pb(hello))
            reading = self._read(messages, engine.info.vocab_size)
            await _until_one_ends(reading, self._write(write), self._heartbeat(), self._failure)
        finally:
            aborted = f", aborting {len(self._handles)} requests" if self._handles else ""
            _log.info("gateway disconnected: %r%s", opening.client_id, aborted, extra=gateway)
            self._router.remove_stream(self._stream_id)

    def deliver(self, outputs: Sequence[EngineCoreOutput], timestamp: float, step: int) -> None:
        # Outputs without a handle belong to requests that the gateway has aborted; they are dropped.
        handles = self._handles
        known = [(handles[output.request_id], output) for output in outputs if output.request_id in handles]
        for handle in self._pending.extend(known):
            self._forget(handle)
        self._on_outputs(timestamp, step)

    def deliver_plain(self, tokens: PlainTokens, timestamp: float, step: int) -> None:
        if tokens.request_ids is not self._column.request_ids:
            self._column = HandleColumn(tokens.request_ids, self._handles)
        self._pending.extend_plain(self._column.handles, self._column.select(tokens.token_ids))
        self._on_outputs(timestamp, step)

    def reject(self, request_id: str, error: EngineError) -> None:
        if request_id in self._handles:
            handle = self._handles[request_id]
            self._forget(handle)
            self._send_control(convert.rejected_to_pb(handle, error))

    def load_changed(self) -> None:
        self._heartbeat_due = True
        self._wake.set()

    def loras_changed(self, loaded: LoadedLoras) -> None:
        self._send_control(convert.loras_to_pb(loaded))

    def drain(self) -> None:
        self._draining = True
        self._send_control(convert.draining_to_pb())

    def fail(self, error: EngineError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _read(self, messages: AsyncIterator[convert.SessionRequest | None], vocab_size: int) -> None:
        async for message in messages:
            match convert.session_message_from_pb(message, now=time.time(), vocab_size=vocab_size):
                case convert.Add(handle, request):
                    await self._add(handle, request)
                case convert.AbortHandles(handles):
                    self._router.abort([self._forget(handle) for handle in handles if handle in self._request_ids])
                case SessionClaim() as claim:
                    self._router.claims.set(self._stream_id, claim)
                case convert.Open():
                    raise InvalidRequest("a session is opened once")

    async def _add(self, handle: int, request: EngineCoreRequest | InvalidRequest) -> None:
        if handle in self._request_ids:
            raise InvalidRequest(f"handle {handle} belongs to an unfinished request of this session")
        try:
            if isinstance(request, InvalidRequest):
                raise request
            await check_media(request)
            request = await hash_embeds(request)
            self._router.submit(self._stream_id, request)
        except EngineError as error:
            self._send_control(convert.rejected_to_pb(handle, error))
        else:
            self._handles[request.request_id] = handle
            self._request_ids[handle] = request.request_id

    async def _write(self, write: Callable[[convert.SessionResponse], Awaitable[None]]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._control:
                await write(self._control.popleft())
            if self._pending.num_bytes or self._heartbeat_due:
                self._heartbeat_due = False
                outputs = self._pending.take()
                outputs.stats = self._router.load_beside(self._stream_id)
                outputs.timestamp, outputs.step = self._timestamp, self._step
                await write(convert.outputs_to_pb(outputs))
            if self._draining and not (self._request_ids or self._pending.num_bytes or self._control):
                return

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._heartbeat_due = True
            self._wake.set()

    def _on_outputs(self, timestamp: float, step: int) -> None:
        self._timestamp, self._step = timestamp, step
        self._wake.set()
        self._check_size()

    def _send_control(self, message: convert.SessionResponse) -> None:
        self._control.append(message)
        self._wake.set()
        self._check_size()

    def _check_size(self) -> None:
        if self._pending.num_bytes + CONTROL_BYTES * len(self._control) > self._max_pending_bytes:
            self.fail(SlowReader(f"more than {self._max_pending_bytes} bytes wait to be read from this session"))
        elif self._pending.num_pooled_bytes > self._max_pending_pooled_bytes:
            limit = self._max_pending_pooled_bytes
            self.fail(SlowReader(f"more than {limit} bytes of pooled values wait to be read from this session"))

    def _forget(self, handle: int) -> str:
        request_id = self._request_ids.pop(handle)
        del self._handles[request_id]
        self._column = HandleColumn((), {})
        return request_id


async def _until_one_ends(*works: Awaitable[None]) -> None:
    """Wait for the first to end, cancel the others, and raise what the first raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
