"""Session: one gateway's stream. Adds and aborts come in, one message a step goes out.

There is one pending message; while the gateway does not read, later steps merge into it, and over 8 MiB the session
is closed. So a slow gateway costs memory, never a step. Knows of gRPC only an iterator to read and a function to
write with.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from proa.contract import EngineCoreOutput, EngineCoreRequest, Hello
from proa_engine.server import convert
from proa_engine.server.errors import EngineError, InvalidRequest, SlowReader
from proa_engine.server.pending import PendingOutputs
from proa_engine.server.request_router import RequestRouter

MAX_PENDING_BYTES = 8 * 1024 * 1024
NOTICE_BYTES = 256
HEARTBEAT_SECONDS = 0.4  # gateways count on 500 ms

_log = logging.getLogger(__name__)


class Session:
    """A client of the frontend that names its requests by handles."""

    def __init__(
        self, frontend: RequestRouter, on_open: Callable[[], None], *, max_pending_bytes: int = MAX_PENDING_BYTES
    ) -> None:
        self._frontend = frontend
        self._on_open = on_open
        self._max_pending_bytes = max_pending_bytes
        self._client = 0
        self._handles: dict[str, int] = {}  # request_id -> handle, of unfinished requests
        self._request_ids: dict[int, str] = {}  # the other way round
        self._pending = PendingOutputs()
        self._notices: deque[convert.SessionResponse] = deque()  # sent before pending outputs
        self._timestamp = 0.0
        self._step = 0
        self._wake = asyncio.Event()
        self._beat_due = False
        self._draining = False
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(
        self,
        messages: AsyncIterator[convert.SessionRequest | None],
        write: Callable[[convert.SessionResponse], Awaitable[None]],
    ) -> None:
        """Serve until the gateway ends the stream or a drained engine has nothing left for it.

        Raises EngineError where the session cannot go on. However it ends, its requests are aborted.
        """
        opening = convert.session_message_from_pb(await anext(messages, None), now=0.0)
        if not isinstance(opening, convert.Open):
            raise InvalidRequest("the first message of a session must be open")
        self._client = self._frontend.attach(self)
        _log.info("session %d opened by %r", self._client, opening.client_id)
        self._on_open()
        try:
            engine = self._frontend.engine
            hello = Hello(instance_id=engine.instance_id, model=engine.info, stats=self._frontend.load())
            await write(convert.hello_to_pb(hello))
            await _until_one_ends(self._read(messages), self._write(write), self._beat(), self._failure)
        finally:
            _log.info("session %d ended with %d unfinished requests", self._client, len(self._handles))
            self._frontend.detach(self._client)

    def deliver(self, outputs: Sequence[EngineCoreOutput], timestamp: float, step: int) -> None:
        # Those without a handle were aborted by the gateway, which wants no more of them.
        handles = map(self._handles.get, (output.request_id for output in outputs))
        finished = self._pending.extend(zip(handles, outputs, strict=True))
        for handle in finished:
            self._forget(handle)
        self._timestamp, self._step = timestamp, step
        self._wake.set()
        self._check_size()

    def reject(self, request_id: str, error: EngineError) -> None:
        handle = self._handles.get(request_id)
        if handle is not None:
            self._forget(handle)
            self._notify(convert.rejected_to_pb(handle, error))

    def drain(self) -> None:
        self._draining = True
        self._notify(convert.draining_to_pb())

    def fail(self, error: EngineError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _read(self, messages: AsyncIterator[convert.SessionRequest | None]) -> None:
        async for message in messages:
            match convert.session_message_from_pb(message, now=time.time()):
                case convert.Add(handle, request):
                    self._add(handle, request)
                case convert.AbortHandles(handles):
                    self._frontend.abort([self._forget(handle) for handle in handles if handle in self._request_ids])
                case convert.Open():
                    raise InvalidRequest("a session is opened once")

    def _add(self, handle: int, request: EngineCoreRequest | InvalidRequest) -> None:
        if handle in self._request_ids:
            raise InvalidRequest(f"handle {handle} belongs to an unfinished request of this session")
        try:
            if isinstance(request, InvalidRequest):
                raise request
            self._frontend.submit(self._client, request)
        except EngineError as error:
            self._notify(convert.rejected_to_pb(handle, error))
        else:
            self._handles[request.request_id] = handle
            self._request_ids[handle] = request.request_id

    async def _write(self, write: Callable[[convert.SessionResponse], Awaitable[None]]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._notices:
                await write(self._notices.popleft())
            if self._pending.num_bytes or self._beat_due:
                self._beat_due = False
                outputs = self._pending.take()
                outputs.stats, outputs.timestamp, outputs.step = self._frontend.load(), self._timestamp, self._step
                await write(convert.outputs_to_pb(outputs))
            if self._draining and not (self._request_ids or self._pending.num_bytes or self._notices):
                return

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._beat_due = True
            self._wake.set()

    def _notify(self, notice: convert.SessionResponse) -> None:
        self._notices.append(notice)
        self._wake.set()
        self._check_size()

    def _check_size(self) -> None:
        if self._pending.num_bytes + NOTICE_BYTES * len(self._notices) > self._max_pending_bytes:
            self.fail(SlowReader(f"more than {self._max_pending_bytes} bytes wait to be read from this session"))

    def _forget(self, handle: int) -> str:
        request_id = self._request_ids.pop(handle)
        del self._handles[request_id]
        return request_id


async def _until_one_ends(*works: Awaitable[None]) -> None:
    """Wait for the first to end, raise what it raised, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
