"""EnginePool: the engines there are, and which of them takes the next request.

Knows addresses and loads, nothing of sessions' contents, text or HTTP.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from proa_gateway.config import Deadlines
from proa_gateway.engines.client import Accept, EngineClient, EngineState
from proa_gateway.engines.retries import RetryBudget
from proa_gateway.engines.tls import OpenChannel, insecure_channels
from proa_gateway.errors import EngineUnavailable, ModelNotFound
from proa_gateway.routing.hints import RoutingHints
from proa_gateway.routing.router import Router

_log = logging.getLogger(__name__)

Observer = Callable[[EngineClient], None]


class Pick(NamedTuple):
    """Which engine takes a request."""

    engine: EngineClient
    num_candidates: int
    num_cached_tokens: int  # of the prompt, that the engine is expected to have
    policy: str

    def to_attributes(self) -> dict[str, str | int]:
        """For a span."""
        return {
            "server.address": self.engine.address,
            "proa.routing.policy": self.policy,
            "proa.routing.num_candidates": self.num_candidates,
            "proa.routing.expected_cached_tokens": self.num_cached_tokens,
        }


class EnginePool:
    """Owns one client and one task for each engine. `set_engines` says which there are; `close` ends all."""

    def __init__(
        self,
        *,
        client_id: str,
        accept: Accept,
        deadlines: Deadlines,
        observe: Observer,
        router: Router,
        open_channel: OpenChannel = insecure_channels,
    ) -> None:
        self._client_id = client_id
        self._accept = accept
        self._deadlines = deadlines
        self._observe = observe
        self._router = router
        self._open_channel = open_channel
        self._clients: dict[str, EngineClient] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._replaced: set[asyncio.Task[None]] = set()  # on their way out, their address being another's
        self._listed = False  # whether `set_engines` was ever called
        self._ready: dict[str, dict[str, EngineClient]] = {}  # by model, as far as asked for; see `_ready_for`
        self._told: dict[str, tuple[EngineState, str | None]] = {}  # what that was made from, by address
        self._models: set[str] = set()  # every name ever served
        self.retry_budget = RetryBudget()
        self._changed = asyncio.Event()  # set whenever an engine says something of itself

    @property
    def engines(self) -> Collection[EngineClient]:
        return self._clients.values()

    @property
    def ready(self) -> bool:
        return any(client.usable for client in self._clients.values())

    def model_names(self) -> list[str]:
        """Names that requests may have now, without repetition, sorted."""
        return sorted({client.model_name for client in self._clients.values() if client.usable and client.model_name})

    def set_engines(self, engines: Mapping[str, str]) -> None:
        """By address, who is there: a pod's UID, say. Connects to the new ones; those that are missing finish what they
        run. One whose address is another's now is gone: what it ran moves, and the other begins without its faults."""
        for address, client in self._clients.items():
            client.retired = engines.get(address) != client.uid
        self._ready.clear()
        for address, uid in sorted(engines.items()):
            task = self._tasks.get(address)
            if task is None or task.done() or self._clients[address].uid != uid:
                self._start(address, uid)
        self._listed = True

    def pick(self, model: str, wish: RoutingHints, *, avoid: Collection[str] = ()) -> Pick:
        """The engine that the router chooses for a request that is sent there now. `avoid` holds addresses.

        Raises `ModelNotFound` for a name never heard of, `EngineUnavailable` where no engine can take a request now.
        """
        # Whether an engine is fit takes as long to say as how good it is, so it is asked of the chosen one first.
        candidates = self._ready_for(model)
        engine = self._router.policy.choose(candidates, wish) if candidates else None
        if engine is None or not engine.usable or engine.suspicious or engine.address in avoid:
            usable = {one.address: one for one in candidates.values() if one.usable and one.address not in avoid}
            candidates = {one.address: one for one in usable.values() if not one.suspicious} or usable
            if not candidates:
                raise self._nobody(model)
            engine = self._router.policy.choose(candidates, wish)
        policy = self._router.policy
        return Pick(engine, len(candidates), policy.record_sent(engine.address, wish), policy.name)

    def check(self, model: str) -> None:
        """Raises what `pick` would raise."""
        if not self._serves(model):
            raise self._nobody(model)

    def expects(self, model: str) -> bool:
        """Whether an engine that is known may turn out to serve the model, were it an hour from now."""
        return any(client.may_serve(model) for client in self._clients.values())

    async def wait_for(
        self, model: str, seconds: float, *, avoid: Collection[str] = (), lost: Collection[str] = ()
    ) -> None:
        """Returns once an engine, but for those to avoid, can take a request for the model. Raises `EngineUnavailable`
        after the time, or as soon as there is none to hope for; one that was just lost may come back, but is not it."""
        now = asyncio.get_running_loop().time
        ends_at = now() + seconds
        while not self._serves(model, avoid):
            patience = min(ends_at - now(), self._hope(model, {*avoid, *lost}))
            if patience <= 0:
                raise EngineUnavailable(f"No engine got ready for the model {model!r}.")
            self._changed.clear()  # whoever waits beside us has been woken by then
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._changed.wait()

    async def close(self) -> None:
        """Ends all sessions; their requests fail."""
        tasks = [*self._tasks.values(), *self._replaced]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, address: str, uid: str) -> None:
        client = EngineClient(
            address,
            uid=uid,
            starting=self._listed,  # those of the first list may be configured, and not there
            client_id=self._client_id,
            accept=self._accept,
            deadlines=self._deadlines,
            on_change=self._on_change,
            open_channel=self._open_channel,
            follow=self._router.follow,
        )
        before = self._tasks.get(address)
        if before is not None and before.cancel():
            self._replaced.add(before)
            before.add_done_callback(self._replaced.discard)
        self._clients[address] = client
        task = asyncio.create_task(_run_after(tuple(self._replaced), client), name=f"engine {address}")
        task.add_done_callback(lambda done: self._ended(address, done))
        self._tasks[address] = task

    def _ended(self, address: str, task: asyncio.Task[None]) -> None:
        """A retired engine's session is over, or the gateway closes. Anything else is our own fault, and is seen."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("engine %s is no longer used", address, exc_info=error)
        if self._tasks.get(address) is task:
            del self._tasks[address], self._clients[address]
            self._told.pop(address, None)
            self._ready.clear()

    def _on_change(self, client: EngineClient) -> None:
        if client.model_name:
            self._models.add(client.model_name)
        told = (client.state, client.model_name)
        if self._told.get(client.address) != told:
            self._told[client.address] = told
            self._ready.clear()
        self._observe(client)
        self._changed.set()

    def _ready_for(self, model: str) -> dict[str, EngineClient]:
        """Those with a session that serve the model, by address. Made anew only when one came or went."""
        ready = self._ready.get(model)
        if ready is None:
            ready = self._ready[model] = {
                client.address: client
                for client in self._clients.values()
                if client.state is EngineState.READY and not client.retired and client.model_name == model
            }
        return ready

    def _hope(self, model: str, avoid: Collection[str]) -> float:
        """Seconds for which somebody is worth waiting for."""
        others = (client for address, client in self._clients.items() if address not in avoid)
        return max((client.hope(model) for client in others), default=0.0)

    def _serves(self, model: str, avoid: Collection[str] = ()) -> bool:
        return any(
            client.usable and client.model_name == model and client.address not in avoid
            for client in self._clients.values()
        )

    def _nobody(self, model: str) -> ModelNotFound | EngineUnavailable:
        if self._models and model not in self._models:
            return ModelNotFound(f"The model {model!r} does not exist.", param="model")
        return EngineUnavailable(f"No engine is ready for the model {model!r}.")


async def _run_after(replaced: Collection[asyncio.Task[None]], client: EngineClient) -> None:
    """Whoever had the address before is gone by then, so that what is kept by address is this one's alone."""
    if replaced:
        await asyncio.wait(replaced)
    await client.run()
