"""EnginePool: one client for each known engine, and the choice of the engine for a request."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from random import Random
from typing import NamedTuple

from proa.contract import EngineCoreRequest, Role
from proa.logs import with_fields
from proa_gateway.config import Deadlines
from proa_gateway.engines.attempts import RetryBudget
from proa_gateway.engines.client import EngineClient, EngineState
from proa_gateway.engines.discovery import OpenChannel
from proa_gateway.engines.failover_log import FailoverLog
from proa_gateway.engines.kv_exchange import KvExchange
from proa_gateway.engines.models import ModelRegistry
from proa_gateway.errors import EngineUnavailable, ModelNotFound
from proa_gateway.keep_running import keep_running
from proa_gateway.routing.policies import RoutingHints
from proa_gateway.routing.router import Router
from proa_gateway.sessions.engine_sessions import EngineSessions, RunningTurn

_log = logging.getLogger(__name__)


class Pick(NamedTuple):
    """The engine chosen for a request."""

    engine: EngineClient
    num_candidates: int  # engines that the policy chose from
    num_cached_tokens: int  # of the prompt, expected in the engine's prefix cache
    policy: str  # its name

    def span_attributes(self) -> dict[str, str | int]:
        return {
            "server.address": self.engine.address,
            "proa.routing.policy": self.policy,
            "proa.routing.num_candidates": self.num_candidates,
            "proa.routing.expected_cached_tokens": self.num_cached_tokens,
        }


class EnginePool:
    """Owns a client and a task for each engine. `set_engines` updates the list; `close` ends all sessions."""

    def __init__(
        self,
        *,
        client_id: str,
        models: ModelRegistry,
        deadlines: Deadlines,
        on_change: Callable[[EngineClient], None],
        on_load: Callable[[], None],
        router: Router,
        open_channel: OpenChannel,
        exchange: KvExchange,
        random: Random | None = None,
    ) -> None:
        """`on_change` is called when an engine's state or model changes, also when its session has ended; `on_load`
        then too, and when its load changes. `random`: of the pauses between attempts to connect; None: a new one."""
        self._client_id = client_id
        self._models = models
        self._deadlines = deadlines
        self._on_state = on_change  # called only if the state or the model's name changes
        self._on_load = on_load
        self._router = router
        self._open_channel = open_channel
        self._random = random or Random()
        self.exchange = exchange
        self._clients: dict[str, EngineClient] = {}  # by address, like all below
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._replaced: set[asyncio.Task[None]] = set()  # cancelled, because another pod has the address now
        self._listed = False  # whether `set_engines` was called
        self._ready: dict[str, dict[str, EngineClient]] = {}  # cache of `_ready_for`, by model
        self._last_seen: dict[str, tuple[EngineState, str | None]] = {}  # state and model name when `_ready` was valid
        self._changed = asyncio.Event()  # an engine's state or load changed; wakes `wait_for`
        self.retry_budget = RetryBudget()  # of all requests
        self.failovers = FailoverLog()
        exchange.watch(self.engines)

    @property
    def engines(self) -> Collection[EngineClient]:
        return self._clients.values()

    @property
    def ready(self) -> bool:
        return any(client.usable for client in self._clients.values())

    def model_names(self) -> list[str]:
        """Return the names of the models that usable engines serve, sorted."""
        return sorted({client.model_name for client in self._clients.values() if client.usable and client.model_name})

    def set_engines(self, engines: Mapping[str, str]) -> None:
        """Set the engines to use, as a mapping of address to pod UID.

        Connects to new ones. Engines that are missing finish their requests. If an address has another UID, the old
        session is cancelled, its requests move to other engines, and the new engine starts with a closed breaker.
        """
        for address, client in self._clients.items():
            was_removed, client.removed = client.removed, engines.get(address) != client.uid
            if client.removed and not was_removed:
                _log.info("engine removed from the list: %s", address, extra=with_fields(engine=address))
                client.leave_sessions()
        self._ready.clear()
        for address, uid in sorted(engines.items()):
            task = self._tasks.get(address)
            if task is None or task.done() or self._clients[address].uid != uid:
                self._start(address, uid)
        self._listed = True

    def pick(self, model: str, hints: RoutingHints, *, avoid: Collection[str] = ()) -> Pick:
        """Choose an engine for a request, which must be sent at once. `avoid` holds addresses.

        Suspect engines are chosen only if there are no others. Raises `ModelNotFound` for a model that no engine has
        ever served, `EngineUnavailable` if no engine can take the request.
        """
        # Filtering all engines takes as long as choosing one, so the policy chooses first from all that were ready.
        candidates, policy = self._ready_for(model), self._router.policy
        engine = self._router.choose(model, candidates, hints) if candidates else None
        if engine is None or not engine.usable or engine.suspect or engine.address in avoid:
            usable = {one.address: one for one in candidates.values() if one.usable and one.address not in avoid}
            candidates = {one.address: one for one in usable.values() if not one.suspect} or usable
            if not candidates:
                raise self._unavailable(model)
            engine = self._router.choose(model, candidates, hints)
        return Pick(engine, len(candidates), policy.record_sent(engine.address, hints), policy.name)

    def begin_turn(
        self,
        sessions: EngineSessions,
        model: str,
        request: EngineCoreRequest,
        hints: RoutingHints,
        before: RunningTurn | None,
    ) -> RunningTurn | None:
        """The request is about to be sent to the engine with these sessions, which serves the model. `before`: of its
        last attempt. None: it is of no session."""
        if sessions.model is not self._router.sessions(model, hints):
            return None
        return sessions.begin(request, hints.block_hashes, before, hints.session_id)

    def check(self, model: str) -> None:
        """Raises what `pick` would raise."""
        if not self._is_served(model):
            raise self._unavailable(model)

    def connected(self, model: str | None) -> list[EngineClient]:
        """Return the engines with a session that serve the model, or any if None, also sleeping ones. `model` may be
        any of its names.

        Raises `ModelNotFound` and `EngineUnavailable` if there are none.
        """
        model = None if model is None else self._models.first_names.get(model, model)
        ready = [one for one in self._clients.values() if one.state is EngineState.READY and not one.removed]
        engines = [one for one in ready if model in (None, one.model_name)]
        if not engines:
            raise EngineUnavailable("No engine is connected.") if model is None else self._unavailable(model)
        return engines

    def refuses_grammars(self, model: str) -> bool:
        """Return whether engines with a session serve the model, and none of them supports grammars."""
        infos = [one.hello.model for one in self._clients.values() if one.hello is not None]
        supported = [info.grammars for info in infos if info.model_name == model]
        return bool(supported) and not any(supported)

    def refuses_loras(self, model: str) -> bool:
        """Return whether engines with a session serve the model, and none of them accepts adapters."""
        infos = [one.hello.model for one in self._clients.values() if one.hello is not None]
        supported = [info.max_loras for info in infos if info.model_name == model]
        return bool(supported) and not any(supported)

    def may_serve(self, model: str) -> bool:
        """Return whether a listed engine serves the model, or may after it connects."""
        return any(client.may_serve(model) for client in self._clients.values())

    async def wait_for(
        self, model: str, seconds: float, *, avoid: Collection[str] = (), lost: Collection[str] = ()
    ) -> None:
        """Wait until an engine that is not in `avoid` can take a request for the model.

        Raises `EngineUnavailable` after `seconds`, or as soon as no engine has a grace period left. Engines in `lost`
        give no reason to wait, but are used if they come back.
        """
        now = asyncio.get_running_loop().time
        ends_at = now() + seconds
        while not self._is_served(model, avoid):
            others = (client for address, client in self._clients.items() if address not in {*avoid, *lost})
            grace_period = max((client.grace_period(model) for client in others), default=0.0)
            timeout = min(ends_at - now(), grace_period)
            if timeout <= 0:
                raise EngineUnavailable(f"No engine got ready for the model {model!r}.")
            self._changed.clear()  # other waiters have been woken already
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._changed.wait()

    async def close(self) -> None:
        """End all sessions; their requests fail."""
        tasks = [*self._tasks.values(), *self._replaced]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.failovers.flush()

    def _start(self, address: str, uid: str) -> None:
        if self._listed:
            _log.info("engine found: %s", address, extra=with_fields(engine=address))
        client = EngineClient(
            address,
            uid=uid,
            newly_listed=self._listed,  # not the first list: its addresses may be configured and never have an engine
            client_id=self._client_id,
            models=self._models,
            router=self._router,
            deadlines=self._deadlines,
            on_change=self._on_change,
            open_channel=self._open_channel,
            random=self._random,
        )
        before = self._tasks.get(address)
        if before is not None and before.cancel():
            self._replaced.add(before)
            before.add_done_callback(self._replaced.discard)
        self._clients[address] = client
        self.exchange.engines_changed()
        task = asyncio.create_task(_run_after(tuple(self._replaced), client), name=f"engine {address}")
        task.add_done_callback(lambda done: self._ended(address, done))
        self._tasks[address] = task

    def _ended(self, address: str, task: asyncio.Task[None]) -> None:
        """A removed engine's session has ended, or the gateway closes."""
        if self._tasks.get(address) is task:
            del self._tasks[address], self._clients[address]
            self._last_seen.pop(address, None)
            self._ready.clear()
            self.exchange.engines_changed()

    def _on_change(self, client: EngineClient) -> None:
        seen = (client.state, client.model_name)
        if self._last_seen.get(client.address) != seen:
            self._last_seen[client.address] = seen
            self._ready.clear()
            self.exchange.engines_changed()
            self._on_state(client)
        self._on_load()
        self._changed.set()

    def _ready_for(self, model: str) -> dict[str, EngineClient]:
        """Return the engines with a session that generate for the model. Cached until one comes or goes."""
        ready = self._ready.get(model)
        if ready is None:
            listed = [one for one in self._clients.values() if one.state is EngineState.READY and not one.removed]
            clients = [one for one in listed if one.role is not Role.PREFILL]
            ready = self._ready[model] = {one.address: one for one in clients if one.model_name == model}
        return ready

    def _is_served(self, model: str, avoid: Collection[str] = ()) -> bool:
        clients = self._clients.values()
        return any(one.usable and one.model_name == model and one.address not in avoid for one in clients)

    def _unavailable(self, model: str) -> ModelNotFound | EngineUnavailable:
        names = self._models.names()
        if names and model not in names:
            return ModelNotFound(f"The model {model!r} does not exist.", param="model")
        if any(one.accepts_prefills and one.model_name == model for one in self._clients.values()):
            return EngineUnavailable(
                f"Only engines of the role prefill serve the model {model!r}; it needs one of the role decode or both."
            )
        return EngineUnavailable(f"No engine is ready for the model {model!r}.")


async def _run_after(replaced: Collection[asyncio.Task[None]], client: EngineClient) -> None:
    """Run a client once replaced clients have ended, so that state kept by address belongs to one of them."""
    if replaced:
        await asyncio.wait(replaced)
    await keep_running(f"the client of engine {client.address}", client.run)
