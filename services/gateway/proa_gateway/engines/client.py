"""EngineClient: keeps a session open with one engine, whatever happens to it, and knows how loaded it is.

Knows nothing of other engines, text or HTTP.
"""

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from enum import Enum
from functools import partial

import grpc

from proa.blocks import BLOCK_HASH_VERSION
from proa_gateway.config import Deadlines
from proa_gateway.engines import convert
from proa_gateway.engines.circuit_breaker import BreakerState, CircuitBreaker
from proa_gateway.engines.session import OutputSink, Session, describe
from proa_gateway.engines.tls import OpenChannel
from proa_gateway.errors import EngineUnavailable
from proa_gateway.types import EngineRequest, EngineStats, Hello, KvEvents, ModelInfo

FIRST_RETRY = 0.1  # seconds
LAST_RETRY = 2.0
# Seconds of silence, or of one step, after which an engine gets requests only where no other can.
SUSPICIOUS_SILENCE = 1.5
STALLED_STEP = 10.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A node whose power is cut sends no FIN. gRPC's own threads send pings and answer them, however busy Python is on
    # either side, so that an engine without a moment for its heartbeats is not taken for a dead one.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    # For pings of gRPC's own, which measure the bandwidth: while one is on its way no other is sent.
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # Each attempt connects anew: retrying is decided here, not by a subchannel shared with an earlier attempt.
    ("grpc.use_local_subchannel_pool", 1),
)
_log = logging.getLogger(__name__)

ReadFiles = Callable[[], Awaitable[dict[str, bytes]]]
Accept = Callable[[str, ModelInfo, ReadFiles], Awaitable[None]]
"""Called with address, model and a way to read its tokenizer's files; raises `EngineRefused`."""
Follow = Callable[[str, Hello, Callable[[], AsyncGenerator[KvEvents, None]]], Coroutine[None, None, None]]
"""Runs beside each session, called with address, Hello and a way to read the events of the engine's cache."""


class EngineRefused(Exception):
    """An engine that must not be used; says why."""


class EngineState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"


class EngineClient:
    """One engine by address. `run` connects again and again, until cancelled or, once retired, the session ends."""

    def __init__(
        self,
        address: str,
        *,
        uid: str,
        starting: bool,
        client_id: str,
        accept: Accept,
        deadlines: Deadlines,
        on_change: Callable[["EngineClient"], None],
        open_channel: OpenChannel,
        follow: Follow,
    ) -> None:
        """`uid`: whose address it is. `starting`: somebody has just said that the engine is there or will be."""
        self.address = address
        self.uid = uid
        self.state = EngineState.CONNECTING
        self.hello: Hello | None = None
        self.load_stats = EngineStats()
        self.load = 0  # unfinished requests, as the engine last said, with those sent since
        self.kv_cache_usage = 0.0
        self.retired = False
        self._breaker = CircuitBreaker()
        self._known_model: str | None = None
        self._client_id = client_id
        self._accept = accept
        self._deadlines = deadlines
        self._on_change = on_change
        self._open_channel = open_channel
        self._follow = follow
        self._session: Session | None = None
        self._hoped_until = 0.0
        if starting:
            self._showed_life()

    @property
    def model_name(self) -> str | None:
        """None while there is no session."""
        return self.hello.model.model_name if self.hello is not None else None

    @property
    def usable(self) -> bool:
        """Whether new requests may be sent."""
        return self.state is EngineState.READY and not self.retired and self.breaker_state is not BreakerState.OPEN

    @property
    def breaker_state(self) -> BreakerState:
        return self._breaker.state(asyncio.get_running_loop().time())

    @property
    def suspicious(self) -> bool:
        """Whether others should be preferred, for it may be dead, starved or stuck in a step."""
        silence = self._session.silence if self._session else 0.0
        return silence > SUSPICIOUS_SILENCE or self.load_stats.last_step_age > STALLED_STEP

    def may_serve(self, model: str) -> bool:
        """Whether its model may be this one, as far as is known."""
        known = self._known_model is None or self._known_model == model
        return known and not self.retired and self.state is not EngineState.DRAINING

    def hope(self, model: str) -> float:
        """For how many seconds it can be hoped that it takes requests for the model: while it has a session, and for a
        while after its last sign of life. An address where nobody ever was gives none."""
        if not self.may_serve(model):
            return 0.0
        if self.state is EngineState.READY:
            return math.inf
        return max(0.0, self._hoped_until - asyncio.get_running_loop().time())

    def submit(self, request: EngineRequest, sink: OutputSink) -> Callable[[], None]:
        """Sends the request. Returns what aborts it, for good even if the session is another by then."""
        if self._session is None:
            raise EngineUnavailable(f"engine {self.address} is not connected")
        self.load += 1
        self._breaker.sent(asyncio.get_running_loop().time())
        return partial(self._session.abort, self._session.submit(request, sink))

    def retire(self) -> None:
        """Nothing new is sent; what runs may end."""
        self.retired = True

    def stats(self, stats: EngineStats) -> None:
        known_here = self._session.num_unfinished if self._session else 0  # some may still be on their way there
        self.load_stats = stats
        self.load = max(stats.num_running_reqs + stats.num_waiting_reqs, known_here)
        self.kv_cache_usage = stats.kv_cache_usage
        self._on_change(self)

    def draining(self) -> None:
        _log.info("engine %s is draining", self.address)
        self.state = EngineState.DRAINING
        self._on_change(self)

    def answered(self) -> None:
        self._breaker.succeeded()

    def faulted(self) -> None:
        if self.state is not EngineState.DRAINING:  # one that leaves has every reason to say no
            self._breaker.failed(asyncio.get_running_loop().time())

    async def run(self) -> None:
        retry = FIRST_RETRY
        complained = ""
        while not self.retired:
            was_open, reason = await self._run_session()
            retry = FIRST_RETRY if was_open else min(2 * retry, LAST_RETRY)
            if was_open or reason != complained:
                _log.warning("engine %s: %s", self.address, reason)
                complained = reason
            if not self.retired:
                await asyncio.sleep(retry * random.uniform(0.5, 1.0))

    async def _run_session(self) -> tuple[bool, str]:
        """One connection from its beginning to its end: whether it was of use, and why it ended."""
        async with self._open_channel(self.address, _OPTIONS) as channel:
            call = convert.open_session(channel)
            try:
                hello = await self._greet(call)
                await self._accept(
                    self.address,
                    hello.model,
                    partial(convert.read_tokenizer_files, channel, seconds=self._deadlines.first_token),
                )
            except TimeoutError:
                return False, f"no answer within {self._deadlines.connect:.1f} s"
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                if channel.get_state() is grpc.ChannelConnectivity.READY:  # the engine said no: it is loading
                    self._showed_life()
                return False, describe(error)
            except EngineRefused as error:
                return False, describe(error)
            async with self._followed(hello, channel):
                return True, await self._serve(call, hello)

    @asynccontextmanager
    async def _followed(self, hello: Hello, channel: grpc.aio.Channel) -> AsyncIterator[None]:
        """What the engine's cache holds is followed meanwhile."""
        events = partial(convert.read_kv_events, channel)
        following = asyncio.create_task(self._follow(self.address, hello, events), name=f"cache of {self.address}")
        following.add_done_callback(self._followed_to_the_end)
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def _followed_to_the_end(self, following: asyncio.Task[None]) -> None:
        if not following.cancelled() and (error := following.exception()) is not None:
            _log.error("engine %s: what its cache holds is no longer known", self.address, exc_info=error)

    async def _greet(self, call: convert.SessionCall) -> Hello:
        async with asyncio.timeout(self._deadlines.connect):
            await call.write(convert.open_to_pb(self._client_id))
            hello = await convert.read_session(call)
        if not isinstance(hello, Hello):
            raise EngineRefused("it did not begin with Hello")
        if hello.model.block_hash_version != BLOCK_HASH_VERSION:
            version = hello.model.block_hash_version
            raise EngineRefused(f"it hashes blocks by version {version}, this gateway by {BLOCK_HASH_VERSION}")
        return hello

    async def _serve(self, call: convert.SessionCall, hello: Hello) -> str:
        session = Session(call, self, heartbeat=self._deadlines.heartbeat)
        self._session, self.hello, self.state = session, hello, EngineState.READY
        self._known_model = hello.model.model_name
        _log.info("engine %s serves %s", self.address, hello.model.model_name)
        reason = "the gateway ended the session"
        try:
            self.stats(hello.stats)
            reason = await session.run()
        finally:
            if session.num_unfinished:
                self.faulted()
            self._session, self.hello, self.state = None, None, EngineState.CONNECTING
            self._showed_life()
            self._on_change(self)
            session.close(reason)
        return reason

    def _showed_life(self) -> None:
        self._hoped_until = asyncio.get_running_loop().time() + self._deadlines.failover
