"""EngineClient: keeps a gRPC session open with one engine and tracks its state and load."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from random import Random
from typing import TypeVar

import grpc

from proa.contract import EngineCoreRequest, Hello, Lora, Role, SchedulerStats
from proa.logs import with_fields
from proa_gateway.config import Deadlines
from proa_gateway.engines import convert
from proa_gateway.engines.discovery import CHANNEL_OPTIONS, OpenChannel, describe_error
from proa_gateway.engines.engine_loras import EngineLoras
from proa_gateway.engines.models import EngineRefused, ModelRegistry
from proa_gateway.engines.session import OutputSink, SentRequest, Session
from proa_gateway.errors import EngineUnavailable, InvalidRequest, LoraNotLoaded
from proa_gateway.routing.index import host_hit_weight
from proa_gateway.routing.router import Router
from proa_gateway.sessions.engine_sessions import EngineSessions

THRESHOLD = 5  # failures in a row
FIRST_COOLDOWN = 1.0  # seconds; doubled each time a probe fails
LAST_COOLDOWN = 30.0
FIRST_RECONNECT_DELAY = 0.1  # seconds, doubled after each failed attempt
LAST_RECONNECT_DELAY = 2.0
# Of an engine that the gateway does not use. Other engines may go, or it is replaced, which is noticed at once.
FIRST_REFUSED_DELAY = 1.0
LAST_REFUSED_DELAY = 10.0
LAST_FAILED_DELAY = 60.0  # where the gateway failed: each attempt may load a tokenizer
# An engine whose last message or whose current step is older, in seconds, gets requests only if no other can take them.
SUSPECT_SILENCE = 1.5
SUSPECT_STEP_AGE = 10.0
T = TypeVar("T")


class BreakerState(IntEnum):
    """The numbers are the values of the metric `proa_gateway_engine_breaker_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class CircuitBreaker:
    """`now` is the time of any monotonic clock, in seconds."""

    __slots__ = ("_cooldown", "_num_failures", "_open_until")

    def __init__(self) -> None:
        self._num_failures = 0  # in a row
        self._cooldown = FIRST_COOLDOWN  # seconds from a failure to the next probe
        self._open_until: float | None = None  # when the next probe is allowed; None: closed

    def state(self, now: float) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def record_sent(self, now: float) -> None:
        """A request is sent. If it is a probe, no other is allowed for a cooldown; after that the probe may have been
        aborted, so another one is."""
        if self._open_until is not None:
            self._open_until = now + self._cooldown

    def record_success(self) -> None:
        """The engine answered a request."""
        if self._num_failures:
            self._num_failures, self._cooldown, self._open_until = 0, FIRST_COOLDOWN, None

    def record_failure(self, now: float) -> None:
        """A session was lost with requests on it, or a request was rejected as unavailable."""
        self._num_failures += 1
        if self._num_failures < THRESHOLD:
            return
        if self._open_until is not None:
            self._cooldown = min(2 * self._cooldown, LAST_COOLDOWN)
        self._open_until = now + self._cooldown


EngineCall = Callable[[grpc.aio.Channel], Awaitable[T]]
"""Calls one method of an engine. Raises `grpc.aio.AioRpcError`."""
_log = logging.getLogger(__name__)


class EngineState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ConnectAttempt:
    """One attempt to connect. `reason`: why there was no session, or why it ended. `is_expected`: the engine loads its
    model, or had said that it drains. `has_answered`: the engine's process listens, though it accepts no session.
    `is_refused`: by the gateway. `failure`: an exception that no one has foreseen."""

    reason: str
    connected: bool = False  # there was a session
    is_expected: bool = False
    has_answered: bool = False
    is_refused: bool = False
    failure: Exception | None = None
    num_requests: int = 0  # that the session left

    @property
    def refusal(self) -> str:
        """Why the gateway does not use an engine that answers. Empty: it would."""
        return self.reason if self.is_refused or self.failure is not None else ""

    def log(self, address: str) -> None:
        """`address`: the engine's."""
        if self.refusal:
            what = "not used, it is tried again"
        elif self.connected:
            what = "gone" if self.is_expected else "lost"
        else:
            what = "not ready yet" if self.is_expected else "not connected"
        text = f"engine {what}: {address}: {self.reason}"
        if self.num_requests:
            text += f"; it had {self.num_requests} requests"
        level = logging.INFO if self.is_expected else logging.WARNING
        fields = with_fields(engine=address, num_requests=self.num_requests or None)
        _log.log(level, text, extra=fields, exc_info=self.failure)

    def delay(self, last: float) -> float:
        """Seconds until the next attempt. `last`: those before this one."""
        if self.refusal:
            longest = LAST_REFUSED_DELAY if self.is_refused else LAST_FAILED_DELAY
            return min(max(2 * last, FIRST_REFUSED_DELAY), longest)
        return FIRST_RECONNECT_DELAY if self.connected else min(2 * last, LAST_RECONNECT_DELAY)


class EngineClient:
    """The engine at one address. `run` reconnects until cancelled, or until its session ends after `removed` is set."""

    def __init__(
        self,
        address: str,
        *,
        uid: str,
        newly_listed: bool,
        client_id: str,
        models: ModelRegistry,
        router: Router,
        deadlines: Deadlines,
        on_change: Callable[["EngineClient"], None],
        open_channel: OpenChannel,
        random: Random,
    ) -> None:
        """`uid`: of the pod. `newly_listed`: discovery has just reported it, so it is about to start. `random`: of the
        pauses between attempts."""
        self.address = address
        self.uid = uid
        self.state = EngineState.CONNECTING
        self.hello: Hello | None = None  # None while there is no session
        self.role = Role.BOTH  # as last reported
        self.load_stats = SchedulerStats()  # as last reported, also by a session that has ended
        self.load = 0  # unfinished requests: as last reported, plus those sent since
        self.kv_cache_usage = 0.0  # used fraction, as last reported
        self.loras = EngineLoras(address, models.loras.learn)
        self._num_loading = 0  # requests that wait until their adapter is loaded; counted in `load`
        self.refusal = ""  # why the gateway does not use it, though it answers
        self._random = random
        self.removed = False  # no longer listed: gets no new requests, finishes those it has
        self._breaker = CircuitBreaker()
        self._last_model_name: str | None = None  # of the last session; None: there was none
        self._client_id = client_id
        self._models = models
        self._router = router
        self._deadlines = deadlines
        self._on_change = on_change
        self._open_channel = open_channel
        self.sessions: EngineSessions | None = None
        self._session: Session | None = None  # while there is one
        self._channel: grpc.aio.Channel | None = None  # while there is a session
        self._grace_ends_at = _in(self._deadlines.failover) if newly_listed else 0.0  # event loop time

    @property
    def model_name(self) -> str | None:
        """None while there is no session."""
        return self.hello.model.model_name if self.hello is not None else None

    @property
    def accepts_requests(self) -> bool:
        """Whether new requests may be sent; to an engine that only prefills, only prefills."""
        if self.state is not EngineState.READY or self.removed or self.load_stats.sleep_level:
            return False
        return self.breaker_state is not BreakerState.OPEN

    @property
    def usable(self) -> bool:
        """Whether new requests that generate or pool may be sent."""
        return self.role is not Role.PREFILL and self.accepts_requests

    @property
    def accepts_prefills(self) -> bool:
        """Whether the engine only prefills, and new requests may be sent."""
        return self.role is Role.PREFILL and self.accepts_requests

    @property
    def is_asleep(self) -> bool:
        """Whether it rejects requests until an operator wakes it up."""
        return self.load_stats.sleep_level > 0

    @property
    def breaker_state(self) -> BreakerState:
        return self._breaker.state(asyncio.get_running_loop().time())

    @property
    def suspect(self) -> bool:
        """Whether other engines are preferred, because it may be dead, starved of CPU or stuck in a step."""
        silence = self._session.silence if self._session else 0.0
        return silence > SUSPECT_SILENCE or self.load_stats.last_step_age > SUSPECT_STEP_AGE

    def may_serve(self, model: str) -> bool:
        """Whether it serves the model now, or may after it connects again."""
        leaving = self.removed or self.state is EngineState.DRAINING or self.role is Role.PREFILL
        return not leaving and self._last_model_name in (None, model)

    def grace_period(self, model: str) -> float:
        """Return the seconds for which requests for the model should wait for this engine: infinite while it has a
        session, then what is left of the failover timeout. 0 for an address that never answered."""
        if not self.may_serve(model):
            return 0.0
        if self.state is EngineState.READY:
            return math.inf
        return max(0.0, self._grace_ends_at - asyncio.get_running_loop().time())

    def submit(self, request: EngineCoreRequest, sink: OutputSink) -> SentRequest:
        """Send a request. Raises `EngineUnavailable` without a session."""
        if self._session is None:
            raise EngineUnavailable(f"engine {self.address} is not connected")
        self.load += 1
        self._breaker.record_sent(asyncio.get_running_loop().time())
        return self._session.submit(request, sink)

    async def call(self, call: EngineCall[T]) -> T:
        """Call a method of the engine. Raises `InvalidRequest`, and `EngineUnavailable` if it fails."""
        if self._channel is None:
            raise EngineUnavailable(f"engine {self.address} is not connected")
        try:
            return await call(self._channel)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidRequest(error.details() or "") from error
            raise EngineUnavailable(f"Engine {self.address}: {describe_error(error)}") from error

    def begin_load_lora(self, lora: Lora, *, replace: bool) -> asyncio.Task[Lora]:
        """Load an adapter. Raises `LoraNotLoaded` without a session."""
        if self._channel is None:
            raise LoraNotLoaded(f"Engine {self.address} is not connected.")
        seconds = self._deadlines.load_lora
        call = partial(convert.load_lora, self._channel, lora, replace=replace, seconds=seconds)
        return self.loras.begin_load(lora, call)

    async def load_lora(self, lora: Lora, *, replace: bool) -> Lora:
        """Load an adapter for a request, which is sent next. Return it with its digest. Raises `LoraNotLoaded`."""
        task = self.begin_load_lora(lora, replace=replace)
        self.load += 1
        self._num_loading += 1
        try:
            return await self.loras.wait(lora, task)
        finally:
            self.load -= 1
            self._num_loading -= 1

    def leave_sessions(self) -> None:
        """The engine gets no new requests any more."""
        if self.sessions is not None:
            self.sessions.leave()

    def on_stats(self, stats: SchedulerStats) -> None:
        num_submitted = self._session.num_unfinished if self._session else 0  # the engine may not have all of them yet
        fell_asleep = stats.sleep_level and not self.is_asleep
        self.load_stats = stats
        if fell_asleep:
            self.leave_sessions()
        self.load = max(stats.num_running_reqs + stats.num_waiting_reqs, num_submitted) + self._num_loading
        self.kv_cache_usage = stats.kv_cache_usage
        if self.sessions is not None and self._session is not None and (claim := self.sessions.on_stats(stats)):
            self._session.claim(claim)
        self._on_change(self)

    def on_draining(self) -> None:
        _log.info("engine draining: %s", self.address, extra=with_fields(engine=self.address))
        self.state = EngineState.DRAINING
        self.leave_sessions()
        self._on_change(self)

    def on_success(self) -> None:
        self._breaker.record_success()

    def on_failure(self) -> None:
        # A draining or sleeping engine rejects requests as it should.
        if self.state is not EngineState.DRAINING and not self.is_asleep:
            self._breaker.record_failure(asyncio.get_running_loop().time())

    async def run(self) -> None:
        delay = FIRST_RECONNECT_DELAY
        last_reason = ""
        while not self.removed:
            try:
                attempt = await self._run_session()
            except Exception as error:  # what its next process or session brings may be no failure
                attempt = _failed(error)
            delay = attempt.delay(delay)
            if attempt.connected or attempt.reason != last_reason:
                attempt.log(self.address)
            last_reason, self.refusal = attempt.reason, attempt.refusal
            if not self.removed:
                await self._wait(attempt, delay * self._random.uniform(0.5, 1.0))

    async def _wait(self, attempt: ConnectAttempt, seconds: float) -> None:
        """Wait for the next attempt, at most `seconds`: an engine that has loaded its model is connected at once, and
        so is another process at the address of one that is not used."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if (attempt.has_answered or attempt.refusal) and await self._has_changed(attempt):
                    return
                await asyncio.sleep(seconds)

    async def _has_changed(self, attempt: ConnectAttempt) -> bool:
        """Wait until the engine has loaded its model, or until the process of one that is not used ends. Returns False
        if neither can be found out."""
        wait = convert.wait_until_loaded if attempt.has_answered else convert.wait_until_gone
        try:
            async with self._open_channel(self.address, CHANNEL_OPTIONS) as channel:
                return await wait(channel)
        except Exception:  # the next attempt reports what is wrong with the engine
            return False

    async def _run_session(self) -> "ConnectAttempt":
        """Connect once, and serve the session until it ends."""
        async with self._open_channel(self.address, CHANNEL_OPTIONS) as channel:
            call = convert.open_session(channel)
            read_files = partial(convert.read_tokenizer_files, channel, seconds=self._deadlines.first_token)
            try:
                hello = await self._handshake(call)
                await self._models.accept(self.address, hello.model, read_files)
            except TimeoutError:
                return ConnectAttempt(f"no answer within {self._deadlines.connect:.1f} s")
            except EngineRefused as error:
                return ConnectAttempt(str(error), is_refused=True)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                has_answered = channel.get_state() is grpc.ChannelConnectivity.READY
                # Where discovery has just reported the engine, nothing may listen at its address yet.
                is_starting = self._last_model_name is None and asyncio.get_running_loop().time() < self._grace_ends_at
                if has_answered:  # it loads its model, or drains
                    self._grace_ends_at = _in(self._deadlines.failover)
                is_expected = has_answered or is_starting
                return ConnectAttempt(describe_error(error), is_expected=is_expected, has_answered=has_answered)
            events = partial(convert.read_kv_events, channel)
            following = asyncio.create_task(
                self._router.follow(self.address, hello, events, lambda: host_hit_weight(hello.model, self.load_stats))
            )
            self._channel = channel
            try:
                return await self._serve(call, hello)
            finally:
                self._channel = None
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _handshake(self, call: convert.SessionCall) -> Hello:
        async with asyncio.timeout(self._deadlines.connect):
            await call.write(convert.open_to_pb(self._client_id))
            hello = await convert.read_session(call)
        if not isinstance(hello, Hello):
            raise EngineRefused("protocol error: the first message is not Hello")
        return hello

    async def _serve(self, call: convert.SessionCall, hello: Hello) -> ConnectAttempt:
        """Return why the session ended, and whether that was expected: the engine had said that it drains."""
        session = Session(call, self, self.loras, heartbeat=self._deadlines.heartbeat)
        self._session, self.hello, self.state = session, hello, EngineState.READY
        self._last_model_name, self.role = hello.model.model_name, hello.model.role
        model, version = hello.model.model_name, hello.model.engine_version
        fields = with_fields(engine=self.address, model=model, engine_version=version)
        _log.info("engine connected: %s serves %s (proa-engine %s)", self.address, model, version, extra=fields)
        reason = "the gateway ended the session"
        try:
            self.sessions = self._router.new_sessions(self, hello.model)
            self.loras.start(model, hello.model.max_loras, hello.loras)
            self.on_stats(hello.stats)
            reason = await session.run()
        finally:
            num_requests = session.num_unfinished
            if num_requests:
                self.on_failure()
            drained = self.state is EngineState.DRAINING
            self._session, self.hello, self.state = None, None, EngineState.CONNECTING
            if self.sessions is not None:
                self.sessions.close()
                self.sessions = None
            self.loras.stop()
            self._grace_ends_at = _in(self._deadlines.failover)
            self._on_change(self)
            session.close(reason)
        return ConnectAttempt(reason, connected=True, is_expected=drained, num_requests=num_requests)


def _in(seconds: float) -> float:
    """The event loop's time so many seconds from now."""
    return asyncio.get_running_loop().time() + seconds


def _failed(error: Exception) -> ConnectAttempt:
    cause = error
    while isinstance(cause, ExceptionGroup):
        cause = cause.exceptions[0]
    return ConnectAttempt(f"the gateway failed: {type(cause).__name__}: {cause}", failure=error)
