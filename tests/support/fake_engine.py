"""FakeEngine: the EngineService over real gRPC, with scripted replies instead of a model.

It uses protobuf messages and no code of the gateway or the engine, so that tests of either check the contract.
Everything runs on the caller's event loop. The `script` returns the `Reply` to each request.
"""

import asyncio
import json
import math
import secrets
import struct
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from proa.blocks import BLOCK_HASH_VERSION, root_hash
from proa.contract import Audio, extra_keys
from proa.contract.audio import hash_audio
from proa.contract.pb import from_pb
from proa.engine.v1 import core_pb2, service_pb2, service_pb2_grpc
from proa.tokenizer_files import digest
from support.prefix_cache import FakePrefixCache
from support.tokenizers import byte_level_tokenizer

SERVICE = "proa.engine.v1.EngineService"
EOS = 0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ message.note }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{% if opening is defined %}{{ '' + opening }}{% endif %}"
)
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_HEARTBEAT_SECONDS = 0.5
_BLOCK_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """Output tokens, with the end token if there is one. `repeat`: repeat them up to `max_tokens`."""

    token_ids: Sequence[int]
    finish_reason: core_pb2.FinishReason = core_pb2.FINISH_REASON_STOP
    stop_reason: int | None = None
    error: str = ""
    repeat: bool = False


Script = Callable[[core_pb2.EngineCoreRequest], Reply]
Pool = Callable[[core_pb2.EngineCoreRequest], list[list[float]]]
"""The rows of a pooled request."""
EMBEDDING_SIZE = 8
LABELS = ("no", "maybe", "yes")


def prompt_ids(request: core_pb2.EngineCoreRequest) -> list[int]:
    return array("I", request.prompt_token_ids).tolist()


def echo(request: core_pb2.EngineCoreRequest) -> Reply:
    """Reply with the prompt and the end token."""
    return Reply([*prompt_ids(request), EOS])


_EMBEDDINGS = {core_pb2.POOLING_TASK_EMBED, core_pb2.POOLING_TASK_TOKEN_EMBED}


def pool(request: core_pb2.EngineCoreRequest) -> list[list[float]]:
    """Values that differ for different prompts and are the same for equal ones, as the request's task has them."""
    params, ids = request.pooling_params, prompt_ids(request)
    mean = sum(ids) / len(ids)
    match params.task:
        case core_pb2.POOLING_TASK_TOKEN_EMBED:
            return [_direction(token_id, params) for token_id in ids]
        case core_pb2.POOLING_TASK_CLASSIFY:
            return [[1 / (1 + mean), 1 / (2 + len(ids)), 0.25][: len(LABELS)]]
        case core_pb2.POOLING_TASK_TOKEN_CLASSIFY:
            return [[1 / (1 + token_id), 0.5, 0.25][: len(LABELS)] for token_id in ids]
        case core_pb2.POOLING_TASK_TOKEN_LOGPROBS:
            return [[-((token_id * 31 + sum(ids)) % 17) / 4 for token_id in params.score_token_ids]]
    return [_direction(mean, params)]


def _direction(angle: float, params: core_pb2.PoolingParams) -> list[float]:
    """A vector of length 1 with `dimensions` values; of length 2 where `use_activation` is false."""
    size = params.dimensions or EMBEDDING_SIZE
    values = [math.sin(angle * (1 + index) / 7) + 0.5 for index in range(size)]
    length = math.hypot(*values) / (2 if params.HasField("use_activation") and not params.use_activation else 1)
    return [value / length for value in values]


def say(text: str, *, repeat: bool = False) -> Script:
    """Reply with the text, tokenized with `tokenizer_files()`, and the end token; or repeat the text."""
    ids = byte_level_tokenizer().encode(text).ids
    reply = Reply(ids if repeat else [*ids, EOS], repeat=repeat)
    return lambda request: reply


def tokenizer_files() -> dict[str, bytes]:
    """Files of a byte-level tokenizer with a chat template, sorted by name. Token 0 is `<eos>`."""
    config = {"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE, "add_bos_token": False}
    return {
        "generation_config.json": json.dumps({"eos_token_id": EOS}).encode(),
        "tokenizer.json": byte_level_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@dataclass(eq=False)
class _Caller:
    """A Session or a Generate call. `send` waits while the transport has unsent messages."""

    is_session: bool
    queue: asyncio.Queue[Any] = field(default_factory=lambda: asyncio.Queue(maxsize=2))
    closed: bool = False

    async def send(self, message: Any) -> None:
        if not self.closed:
            await self.queue.put(message)

    def close(self) -> None:
        self.closed = True
        while not self.queue.empty():  # unblocks a step that waits in `send`
            self.queue.get_nowait()


@dataclass(eq=False)
class _Running:
    caller: _Caller
    handle: int
    request: core_pb2.EngineCoreRequest
    reply: Reply
    length: int  # output tokens, including resumed ones
    queued: float
    position: int
    num_cached_tokens: int = 0
    fetching: asyncio.Task[None] | None = None  # blocks from another engine
    fetch: core_pb2.KvFetch | None = None

    @property
    def is_ready(self) -> bool:
        return self.fetching is None or self.fetching.done()

    @property
    def known_ids(self) -> list[int]:
        """Of the prompt and the resumed tokens."""
        return [*prompt_ids(self.request), *array("I", self.request.resumed_token_ids)]

    @property
    def is_pooled(self) -> bool:
        return self.request.HasField("pooling_params")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids) // 4

    @property
    def extra_keys(self) -> tuple[bytes | str, ...]:
        audios = [from_pb(Audio, audio) for audio in self.request.audios]
        return extra_keys(self.request.cache_salt, self.request.lora_name, self.request.lora_digest, audios)


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    def __init__(self) -> None:
        super().__init__()
        self.num_watches = 0

    async def Watch(self, request: Any, context: Any) -> None:
        self.num_watches += 1
        await super().Watch(request, context)


class FakeEngine(service_pb2_grpc.EngineServiceServicer):
    """Call `start` and `stop`. Attributes may be changed while it runs.

    `step_delay`: seconds before each step; None: steps run only when the test calls `step`.
    `requests` and `aborted` record requests and aborted request ids, in order. With a `checkpoint_rule`, the engine
    behaves like one whose model has sliding windows: it has a prefix cache, sends KV events and reports hits.
    With `movers`, which engines of a test share, it has a prefix cache too, fetches blocks from the others by their
    address, and takes `prefill_only`.
    `lora_folders`: content of the adapters in its file system, by path. `loras`: path of the loaded ones, by name.
    """

    def __init__(
        self,
        *,
        script: Script = echo,
        step_delay: float | None = 0.0,
        model_name: str = "fake",
        files: dict[str, bytes] | None = None,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        num_gpu_blocks: int = 4096,
        max_waiting_requests: int = 4096,
        grammars: bool = True,
        checkpoint_rule: service_pb2.CheckpointRule | None = None,
        pool: Pool = pool,
        pooling_tasks: Sequence[core_pb2.PoolingTask] = (),
        pooling_only: bool = False,
        embedding_size: int = EMBEDDING_SIZE,
        labels: Sequence[str] = LABELS,
        max_loras: int = 0,
        max_embed_len: int = 0,
        num_host_blocks: int = 0,
        movers: "dict[str, FakeEngine] | None" = None,
        role: service_pb2.Role = service_pb2.ROLE_UNSPECIFIED,
        lora_folders: dict[str, str] | None = None,
        loras: dict[str, str] | None = None,
    ) -> None:
        self.script = script
        self.pool = pool
        self.step_delay = step_delay
        self.files = tokenizer_files() if files is None else files
        self.requests: list[core_pb2.EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.rejection: service_pb2.Rejected | None = None  # if set, the reply to every request
        self.loading = False  # while true, sessions are rejected; ended by `finish_loading`
        self.stuck = False  # no steps, but heartbeats with the age of the last step
        self.silent = False  # no steps and no heartbeats, on an open connection
        self.sleep_level = 0  # reported
        self.prefill_rate = 0.0  # tokens per second, reported
        self.prefix_cache_hits = 0  # tokens, reported
        self.foreign_load = 0  # running requests of others, reported
        self.foreign_tokens = 0  # waiting tokens of others, reported
        self.fetch_wait: float | None = None  # seconds without a block, in place of the request's
        self.fetch_bytes_per_second = 1e9  # reported
        self.num_computed_tokens = 0  # of prompts
        self.movers = movers
        self.fingerprint = b"same"
        self.kv_cache_usage: float | None = None  # reported in place of the requests' usage
        self.kv_events: asyncio.Queue[service_pb2.SubscribeKvEventsResponse | None] | None = (
            None  # None in it ends a stream
        )
        self.num_kv_subscriptions = 0
        self.address = ""
        self.step_count = 0
        self._sessions: list[_Caller] = []
        self._waiting: list[_Running] = []
        self._running: list[_Running] = []
        self._draining = False
        self._last_step = time.monotonic()
        self._waiters: list[tuple[Callable[[FakeEngine], bool], asyncio.Future[None]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self.health = _Health()
        self.info = service_pb2.GetModelInfoResponse(
            model_name=model_name,
            model=f"/models/{model_name}",
            max_model_len=max_model_len,
            vocab_size=512,
            block_size=16,
            num_gpu_blocks=num_gpu_blocks,
            block_hash_version=BLOCK_HASH_VERSION,
            tokenizer_digest=digest(self.files) if self.files else "",
            eos_token_ids=[EOS],
            max_num_seqs=max_num_seqs,
            max_logprobs=20,
            max_waiting_requests=max_waiting_requests,
            max_num_batched_tokens=8192,
            engine_version="0.0.0",
            prefix_caching=True,
            grammars=grammars,
            checkpoint_rule=checkpoint_rule,
            pooling_tasks=pooling_tasks,
            pooling_only=pooling_only,
            embedding_size=embedding_size if _EMBEDDINGS.intersection(pooling_tasks) else 0,
            labels=labels if core_pb2.POOLING_TASK_CLASSIFY in pooling_tasks else (),
            max_loras=max_loras,
            max_embed_len=max_embed_len,
            num_host_blocks=num_host_blocks,
            role=role,
        )
        self.pixels: dict[bytes, bytes] = {}  # of the images that it keeps, by hash
        self.samples: dict[bytes, bytes] = {}  # of the audios that it keeps, by hash
        self.claim = service_pb2.SessionClaim()  # the last one
        self.lora_folders = lora_folders or {}
        self.loras = {name: self._lora(name, path) for name, path in (loras or {}).items()}
        self.lora_loads: list[service_pb2.LoadLoraRequest] = []
        self.resets: list[float] = []  # `since` of each reset of the prefix cache
        self.lora_gate = asyncio.Event()  # loads wait for it
        self.lora_gate.set()
        self.prefix_cache = None
        if checkpoint_rule is not None or movers is not None:
            self.prefix_cache = FakePrefixCache(checkpoint_rule, root_hash(self.info.model, self.info.revision))
        self.instance_id = secrets.token_hex(8)

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> str:
        """Serve on `port`, by default a free one. Returns `host:port`."""
        self._draining = False
        self._server = grpc.aio.server(options=_OPTIONS)
        service_pb2_grpc.add_EngineServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.address = f"{host}:{self._server.add_insecure_port(f'{host}:{port}')}"
        if self.movers is not None:
            self.movers[self.address] = self
            port_number = int(self.address.rpartition(":")[2])
            self.info.kv_transfer.CopyFrom(
                service_pb2.KvTransfer(fingerprint=self.fingerprint, ports=[port_number], block_bytes=_BLOCK_BYTES)
            )
        await self._server.start()
        await self._set_health(_SERVING)
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._beat())]
        return self.address

    async def stop(self, grace: float | None = None) -> None:
        """Close all calls after the grace period, by default at once. Clients see a broken connection."""
        if self.movers is not None:
            self.movers.pop(self.address, None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
            sessions, self._sessions = self._sessions, []
            for session in sessions:  # gRPC does not always end a call that has just arrived
                await self._leave(session)

    async def __aenter__(self) -> "FakeEngine":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def finish_loading(self) -> None:
        """Accept sessions from now on."""
        self.loading = False
        await self._set_health(_SERVING)

    async def drain(self) -> None:
        """Reject new requests, send `Draining`, and close each session when its last request ends."""
        self._draining = True
        await self._set_health(_NOT_SERVING)
        for session in list(self._sessions):
            await session.send(service_pb2.SessionResponse(draining=service_pb2.Draining()))
        await self._close_drained()

    async def send_loras(self) -> None:
        """Tell all sessions which adapters are loaded."""
        for session in list(self._sessions):
            await session.send(service_pb2.SessionResponse(loras=self._loaded_loras()))

    async def until(self, predicate: Callable[["FakeEngine"], bool], seconds: float | None = 10.0) -> None:
        """Wait until `predicate(self)` is true; it is checked after each request, abort, step and session."""
        if not predicate(self):
            reached = asyncio.get_running_loop().create_future()
            self._waiters.append((predicate, reached))
            async with asyncio.timeout(seconds):
                await reached

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def stats(self) -> core_pb2.SchedulerStats:
        blocks = sum(-(-(item.num_prompt_tokens + item.position) // 16) for item in self._running)
        usage = blocks / self.info.num_gpu_blocks if self.kv_cache_usage is None else self.kv_cache_usage
        return core_pb2.SchedulerStats(
            num_running_reqs=len(self._running) + self.foreign_load,
            num_waiting_reqs=len(self._waiting),
            num_fetching_reqs=sum(not item.is_ready for item in self._waiting),
            num_waiting_tokens=sum(item.num_prompt_tokens for item in self._waiting) + self.foreign_tokens,
            kv_cache_usage=usage,
            sleep_level=self.sleep_level,
            prefill_tokens_per_second=self.prefill_rate,
            prefix_cache_hits=self.prefix_cache_hits,
            last_step_age=time.monotonic() - self._last_step if self.stuck else 0.0,
        )

    async def step(self) -> None:
        """Send one token for each running request, in one message for each session."""
        room = self.info.max_num_seqs - len(self._running)
        joining = [item for item in self._waiting if item.is_ready][:room]
        self._running += joining
        self._waiting = [item for item in self._waiting if item not in joining]
        self.step_count += 1
        now = time.time()
        if self.prefix_cache is not None:
            for item in joining:
                item.num_cached_tokens = self.prefix_cache.compute(item.known_ids, item.extra_keys)
                self.num_computed_tokens += len(item.known_ids) - item.num_cached_tokens
        batches = {session: core_pb2.EngineCoreOutputs() for session in self._sessions}
        columns = {session: (array("I"), array("I")) for session in self._sessions}
        calls: list[tuple[_Caller, core_pb2.EngineCoreOutput]] = []
        for item in self._running:
            token, output = self._advance(item, now)
            if not item.caller.is_session:
                calls.append((item.caller, output or core_pb2.EngineCoreOutput(new_token_ids=[token])))
            elif output is None:
                handles, tokens = columns[item.caller]
                handles.append(item.handle)
                tokens.append(token)
            else:
                batches[item.caller].outputs.append(output)
        self._running = [item for item in self._running if item.position < item.length]
        self._last_step = time.monotonic()
        stats = self.stats()
        for session, batch in batches.items():
            handles, tokens = columns[session]
            if batch.outputs or handles:
                batch.plain_handles, batch.plain_token_ids = handles.tobytes(), tokens.tobytes()
                batch.stats.CopyFrom(stats)
                batch.timestamp, batch.step = now, self.step_count
                await session.send(service_pb2.SessionResponse(outputs=batch))
        for caller, output in calls:
            await caller.send(service_pb2.GenerateResponse(output=output))
        await self._close_drained()
        self._notify()

    # EngineService

    async def Session(self, request_iterator: AsyncIterator[service_pb2.SessionRequest], context: Any) -> None:
        if self._draining or self.loading:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is loading, or shutting down")
        session = _Caller(is_session=True)
        hello = service_pb2.Hello(
            instance_id=self.instance_id, model=self.info, stats=self.stats(), loras=self._loaded_loras()
        )
        await context.write(service_pb2.SessionResponse(hello=hello))
        self._sessions.append(session)
        self._notify()
        reader = asyncio.create_task(self._read_session(session, request_iterator))
        try:
            while (message := await session.queue.get()) is not None:
                await context.write(message)
        finally:
            # First what needs no await: the call may be cancelled again while it ends.
            reader.cancel()
            if session in self._sessions:
                self._sessions.remove(session)
            await self._leave(session)
            await asyncio.gather(reader, return_exceptions=True)

    async def Generate(self, request: service_pb2.GenerateRequest, context: Any) -> None:
        if not request.request.request_id:
            request.request.request_id = secrets.token_hex(16)
        caller = _Caller(is_session=False)
        if rejected := self._admit(caller, 0, request.request):
            code = next(code for code in grpc.StatusCode if code.value[0] == rejected.code)
            await context.abort(code, rejected.message)
        self._notify()
        try:
            while (message := await caller.queue.get()) is not None:
                await context.write(message)
                if message.output.finish_reason:
                    return
        finally:
            await self._leave(caller)

    async def Abort(self, request: service_pb2.AbortRequest, context: Any) -> service_pb2.AbortResponse:
        await self._abort([item for item in self._unfinished() if item.request.request_id in request.request_ids])
        return service_pb2.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> service_pb2.GetModelInfoResponse:
        return self.info

    async def GetTokenizer(self, request: Any, context: Any) -> None:
        for name, data in sorted(self.files.items()):
            for start in range(0, len(data), 256 * 1024):
                part = data[start : start + 256 * 1024]
                await context.write(service_pb2.GetTokenizerResponse(file_name=name, data=part))

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        if self.kv_events is None and self.prefix_cache is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the fake engine has no KV events")
        self.num_kv_subscriptions += 1
        self._notify()
        events = self.prefix_cache.subscribe() if self.prefix_cache is not None else self.kv_events
        while events is not None and (message := await events.get()) is not None:
            await context.write(message)

    async def GetLoad(self, request: Any, context: Any) -> service_pb2.GetLoadResponse:
        return service_pb2.GetLoadResponse(stats=self.stats())

    async def ResetPrefixCache(
        self, request: service_pb2.ResetPrefixCacheRequest, context: Any
    ) -> service_pb2.ResetPrefixCacheResponse:
        self.resets.append(request.since)
        return service_pb2.ResetPrefixCacheResponse()

    async def LoadLora(self, request: service_pb2.LoadLoraRequest, context: Any) -> service_pb2.LoadLoraResponse:
        self.lora_loads.append(request)
        self._notify()
        await self.lora_gate.wait()
        if not self.info.max_loras:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "adapters are not enabled")
        if request.path not in self.lora_folders:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no adapter at {request.path}")
        lora, known = self._lora(request.name, request.path), self.loras.get(request.name)
        if known is not None and known.digest != lora.digest and not request.replace:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{request.name} is loaded")
        if known is None or known.digest != lora.digest:
            self.loras[request.name] = lora
            await self.send_loras()
        return service_pb2.LoadLoraResponse(lora=self.loras[request.name])

    async def UnloadLora(self, request: service_pb2.UnloadLoraRequest, context: Any) -> service_pb2.UnloadLoraResponse:
        if self.loras.pop(request.name, None) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no adapter has the name {request.name}")
        await self.send_loras()
        return service_pb2.UnloadLoraResponse()

    # Private

    def _lora(self, name: str, path: str) -> service_pb2.Lora:
        return service_pb2.Lora(name=name, path=path, digest=self.lora_folders[path])

    def _loaded_loras(self) -> service_pb2.LoadedLoras:
        return service_pb2.LoadedLoras(loras=[self.loras[name] for name in sorted(self.loras)])

    async def _read_session(self, session: _Caller, messages: AsyncIterator[service_pb2.SessionRequest]) -> None:
        async for message in messages:
            if message.HasField("add"):
                if rejected := self._admit(session, message.add.handle, message.add.request):
                    await session.send(service_pb2.SessionResponse(rejected=rejected))
            elif message.HasField("abort"):
                handles = set(message.abort.handles)
                gone = [item for item in self._unfinished() if item.caller is session and item.handle in handles]
                await self._abort(gone)
            elif message.HasField("claim"):
                self.claim = message.claim
            self._notify()
        await session.send(None)

    def _admit(self, caller: _Caller, handle: int, request: core_pb2.EngineCoreRequest) -> service_pb2.Rejected | None:
        self.requests.append(request)
        if self.rejection is not None:
            rejected = service_pb2.Rejected()
            rejected.CopyFrom(self.rejection)
            rejected.handle = handle
            return rejected
        if self._draining:
            return service_pb2.Rejected(handle=handle, code=14, message="the engine is shutting down", retryable=True)
        if len(self._waiting) >= self.info.max_waiting_requests:
            return service_pb2.Rejected(handle=handle, code=8, message="the waiting queue is full", retryable=True)
        if request.lora_name and not self._has_lora(request):
            message = f"the adapter {request.lora_name} is not loaded"
            return service_pb2.Rejected(handle=handle, code=5, message=message, retryable=True)
        num_prompt_tokens = len(request.prompt_token_ids) // 4
        room = self.info.max_model_len - num_prompt_tokens
        if not num_prompt_tokens or room < (0 if request.HasField("pooling_params") else 1):
            return service_pb2.Rejected(handle=handle, code=3, message=f"a prompt of {num_prompt_tokens} tokens")
        if request.HasField("pooling_params"):
            if request.pooling_params.task not in self.info.pooling_tasks:
                return service_pb2.Rejected(handle=handle, code=3, message="the model does not have this pooling task")
            self._waiting.append(_Running(caller, handle, request, Reply([0]), 1, time.time(), 0))
            return None
        if self.info.pooling_only:
            return service_pb2.Rejected(handle=handle, code=3, message="the model generates no tokens")
        if refused := self._admit_images(handle, request) or self._admit_audios(handle, request):
            return refused
        params = request.sampling_params
        limit = min(params.max_tokens, room) if params.HasField("max_tokens") else room
        reply = self.script(request)
        length = limit if reply.repeat else min(limit, len(reply.token_ids))
        resumed = len(request.resumed_token_ids) // 4
        item = _Running(caller, handle, request, reply, length, time.time(), resumed)
        if request.HasField("kv_source") and self.movers is not None:
            item.fetching = asyncio.create_task(self._fetch(item, self.movers))
        self._waiting.append(item)
        return None

    async def _fetch(self, item: _Running, movers: "dict[str, FakeEngine]") -> None:
        """Fetch the request's blocks from its source, as they become known there."""
        cache, source = self.prefix_cache, item.request.kv_source
        assert cache is not None
        hashes = cache.hashes(item.known_ids, item.extra_keys)[: (len(item.known_ids) - 1) // 16]
        wanted = hashes[: source.num_blocks or None]
        began = progress = time.time()
        num_held = num_known = cache.count(wanted)
        error = ""
        while num_known < len(wanted):
            peer = movers.get(source.addresses[0])
            if peer is None or peer.prefix_cache is None:
                error = "the connection was refused"
                break
            now, found = time.time(), peer.prefix_cache.count(wanted)
            if found > num_known:
                num_known, progress = found, now
            elif now - progress > ((source.wait_ms or 2000) / 1000 if self.fetch_wait is None else self.fetch_wait):
                break
            await asyncio.sleep(0.005)
        cache.store(wanted[:num_known])
        num_bytes = (num_known - num_held) * _BLOCK_BYTES
        item.fetch = core_pb2.KvFetch(
            started=began,
            ended=began + num_bytes / self.fetch_bytes_per_second,
            num_tokens=16 * (num_known - num_held),
            num_bytes=num_bytes,
            error=error,
        )
        asyncio.get_running_loop().call_soon(self._notify)

    def _admit_images(self, handle: int, request: core_pb2.EngineCoreRequest) -> service_pb2.Rejected | None:
        """Keep the images' pixels, unless some are missing."""
        sent = {image.hash: image.pixels for image in request.images if image.pixels}
        missing = [image.hash for image in request.images if image.hash not in sent | self.pixels]
        if missing:
            message = "the engine has not kept some images"
            return service_pb2.Rejected(handle=handle, code=9, message=message, missing_images=b"".join(missing))
        self.pixels |= sent
        ids = prompt_ids(request)
        for image in request.images:
            pixels = self.pixels[image.hash]
            run = {self.info.images.token_id}
            if len(pixels) != image.height * image.width * 3 or image.hash != _image_hash(image, pixels):
                return service_pb2.Rejected(handle=handle, code=3, message="an image has other pixels than it says")
            if set(ids[image.offset : image.offset + image.num_tokens]) != run:
                return service_pb2.Rejected(handle=handle, code=3, message="an image is not where its tokens are")
        return None

    def _admit_audios(self, handle: int, request: core_pb2.EngineCoreRequest) -> service_pb2.Rejected | None:
        """Keep the audios' samples, unless some are missing."""
        if self.info.audios.cross_attention and len(request.audios) != 1:
            return service_pb2.Rejected(handle=handle, code=3, message=f"{len(request.audios)} audios")
        sent = {audio.hash: audio.samples for audio in request.audios if audio.samples}
        missing = [audio.hash for audio in request.audios if audio.hash not in sent | self.samples]
        if missing:
            message = "the engine has not kept some audios"
            return service_pb2.Rejected(handle=handle, code=9, message=message, missing_audios=b"".join(missing))
        self.samples |= sent
        for audio in request.audios:
            samples = self.samples[audio.hash]
            if len(samples) != 4 * audio.num_samples or audio.hash != hash_audio(samples):
                return service_pb2.Rejected(handle=handle, code=3, message="an audio has other samples than it says")
            if audio.num_samples > self.info.audios.max_samples:
                return service_pb2.Rejected(handle=handle, code=3, message="an audio is too long")
        return None

    def _has_lora(self, request: core_pb2.EngineCoreRequest) -> bool:
        lora = self.loras.get(request.lora_name)
        return lora is not None and request.lora_digest in ("", lora.digest)

    def _advance(self, item: _Running, now: float) -> tuple[int, core_pb2.EngineCoreOutput | None]:
        """The request's next token, and an `EngineCoreOutput` if the output has more than that."""
        if item.is_pooled:
            item.position += 1
            return 0, self._pooled_output(item, now)
        if item.request.prefill_only:
            item.position = item.length
            return 0, core_pb2.EngineCoreOutput(
                handle=item.handle,
                finish_reason=core_pb2.FINISH_REASON_STOP,
                num_prompt_tokens=item.num_prompt_tokens,
                num_cached_tokens=item.num_cached_tokens,
                fetch=item.fetch,
            )
        reply, position = item.reply, item.position
        token = reply.token_ids[position % len(reply.token_ids)]
        item.position += 1
        params = item.request.sampling_params
        is_first = position == len(item.request.resumed_token_ids) // 4
        is_last = item.position == item.length
        fills_block = self.movers is not None and not (item.num_prompt_tokens + position) % 16
        if (is_last or fills_block) and self.prefix_cache is not None:
            outputs = [reply.token_ids[number % len(reply.token_ids)] for number in range(position)]
            self.prefix_cache.finish([*prompt_ids(item.request), *outputs], item.extra_keys)
        if not (is_first or is_last or params.HasField("logprobs")):
            return token, None
        output = core_pb2.EngineCoreOutput(handle=item.handle, new_token_ids=[token])
        if not item.caller.is_session:
            output.request_id = item.request.request_id
        if params.HasField("logprobs"):
            output.logprobs.append(_logprobs(token, params.logprobs, params.logprob_token_ids))
        if is_first:
            kinds = (core_pb2.EVENT_TYPE_QUEUED, core_pb2.EVENT_TYPE_SCHEDULED, core_pb2.EVENT_TYPE_FIRST_TOKEN)
            moments = (item.queued, (item.queued + now) / 2, now)
            output.events.extend(core_pb2.Event(type=k, timestamp=t) for k, t in zip(kinds, moments, strict=True))
            if params.HasField("prompt_logprobs"):
                prompt = prompt_ids(item.request)[1:]
                output.prompt_logprobs.extend(_logprobs(other, params.prompt_logprobs) for other in prompt)
        if is_first or is_last:
            output.num_prompt_tokens, output.num_cached_tokens = item.num_prompt_tokens, item.num_cached_tokens
            if item.fetch is not None:
                output.fetch.CopyFrom(item.fetch)
        if is_last:
            at_end = not reply.repeat and item.length == len(reply.token_ids)
            output.finish_reason = reply.finish_reason if at_end else core_pb2.FINISH_REASON_LENGTH
            if at_end and reply.stop_reason is not None:
                output.stop_reason = reply.stop_reason
            output.error = reply.error if at_end else ""
            output.num_output_tokens = item.length
            output.events.append(core_pb2.Event(type=core_pb2.EVENT_TYPE_FINISHED, timestamp=now))
        return token, output

    def _pooled_output(self, item: _Running, now: float) -> core_pb2.EngineCoreOutput:
        rows = self.pool(item.request)
        return core_pb2.EngineCoreOutput(
            handle=item.handle,
            request_id="" if item.caller.is_session else item.request.request_id,
            finish_reason=core_pb2.FINISH_REASON_STOP,
            num_prompt_tokens=item.num_prompt_tokens,
            num_cached_tokens=0,
            events=[core_pb2.Event(type=core_pb2.EVENT_TYPE_FINISHED, timestamp=now)],
            pooled=array("f", [value for row in rows for value in row]).tobytes(),
            num_pooled_rows=len(rows),
        )

    def _unfinished(self) -> list[_Running]:
        return [*self._waiting, *self._running]

    async def _abort(self, items: Iterable[_Running], *, tell: bool = True) -> None:
        for item in items:
            queue = self._waiting if item in self._waiting else self._running
            queue.remove(item)
            if item.fetching is not None:
                item.fetching.cancel()
            self.aborted.append(item.request.request_id)
            if tell and not item.caller.is_session:
                output = core_pb2.EngineCoreOutput(finish_reason=core_pb2.FINISH_REASON_ABORT)
                await item.caller.send(service_pb2.GenerateResponse(output=output))
        await self._close_drained()
        self._notify()

    async def _leave(self, caller: _Caller) -> None:
        caller.close()
        await self._abort([item for item in self._unfinished() if item.caller is caller], tell=False)

    async def _close_drained(self) -> None:
        if self._draining:
            busy = {id(item.caller) for item in self._unfinished()}
            for session in self._sessions:
                if id(session) not in busy:
                    await session.send(None)

    async def _run(self) -> None:
        while True:
            await self.until(FakeEngine._may_step, seconds=None)
            await asyncio.sleep(self.step_delay or 0.0)
            if self._may_step():
                await self.step()

    def _may_step(self) -> bool:
        may_run = self.step_delay is not None and not self.stuck and not self.silent
        return may_run and (bool(self._running) or any(item.is_ready for item in self._waiting))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            outputs = core_pb2.EngineCoreOutputs(stats=self.stats(), timestamp=time.time(), step=self.step_count)
            for session in [] if self.silent else list(self._sessions):
                with suppress(asyncio.QueueFull):
                    session.queue.put_nowait(service_pb2.SessionResponse(outputs=outputs))
            self._notify()  # attributes that a test sets take effect within a heartbeat

    def _notify(self) -> None:
        for predicate, reached in list(self._waiters):
            if reached.done() or predicate(self):
                self._waiters.remove((predicate, reached))
                if not reached.done():
                    reached.set_result(None)

    async def _set_health(self, status: Any) -> None:
        startup = _NOT_SERVING if self.loading else _SERVING
        for service, each in (("", status), (SERVICE, status), ("startup", startup), ("liveness", _SERVING)):
            await self.health.set(service, each)


def _image_hash(image: core_pb2.Image, pixels: bytes) -> bytes:
    return sha256(struct.pack("<II", image.height, image.width) + pixels).digest()[:16]


def _logprobs(token: int, top: int, named: Sequence[int] = ()) -> core_pb2.TokenLogprobs:
    others = named or [token, *(other for other in range(top) if other != token)][:top]
    values = [-0.25 * (rank + 1) for rank in range(len(others))]
    return core_pb2.TokenLogprobs(token_id=token, logprob=-0.25, rank=1, top_token_ids=others, top_logprobs=values)
