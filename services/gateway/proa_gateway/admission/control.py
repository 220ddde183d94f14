"""Admission control: API key limits, gateway limits, waiting for a model's first engine, waiting for capacity."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from proa_gateway.admission.auth import Caller
from proa_gateway.admission.fair_queue import AdmissionBounds, Bound, QueuedRequest
from proa_gateway.admission.rate_limits import Lease
from proa_gateway.admission.request_queue import RequestQueue
from proa_gateway.admission.session_queue import SessionQueue, Wait
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.models import KnownLora, ModelRegistry, ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import EngineUnavailable, InvalidRequest, ModelNotFound, Overloaded
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.scaler.demand import Demand
from proa_gateway.sessions.model_sessions import ModelSessions

# Output tokens expected of a sequence whose `max_tokens` is larger: few sequences use up a large limit.
EXPECTED_OUTPUT = 256


class ModelLookup:
    """A model is known if an engine has served it or `--model` names it, whether or not an engine serves it now. An
    adapter is a model beside that of its engines."""

    def __init__(self, config: GatewayConfig, *, pool: EnginePool, models: ModelRegistry) -> None:
        self._config = config
        self._pool = pool
        self._models = models

    def names(self) -> list[str]:
        """Names of models that requests may use: the first ones, further ones, and last those of adapters."""
        models = self._engine_models()
        aliases = [alias for model in models for alias in self._models.aliases(model)]
        loras = [each.lora.name for each in self._models.loras if self._base_of(each) in models]
        return list(dict.fromkeys([*models, *aliases, *sorted(loras)]))

    def base_name(self, name: str) -> str:
        """The name of the engines' model: of an adapter's, or the name itself. Raises `InvalidRequest`."""
        lora = self._models.loras.get(name)
        if lora is None or not (known := self.known) or name in known:
            return name
        base = self._base_of(lora)
        if base is None:
            message = f"The adapter {name!r} needs a base_model_name, one of {', '.join(sorted(known))}."
            raise InvalidRequest(message, param="model")
        return base

    def get(self, name: str) -> ServedModel:
        """A model or an adapter with its model. Raises `EngineUnavailable` if no engine has served it yet."""
        base = self.base_name(name)
        model, lora = self._models.get(base), self._models.loras.get(name)
        return model if lora is None or base == name else replace(model, lora=lora.lora)

    def name(self, requested: str | None) -> str:
        """The first name of the requested model; of the only one for None or an empty name. Raises `InvalidRequest` and
        `EngineUnavailable`."""
        if requested:
            return self._models.first_names.get(requested, requested)
        names = self._pool.model_names() or self._engine_models()
        if len(names) > 1:
            raise InvalidRequest(f"model must be one of {', '.join(names)}.", param="model")
        if not names:
            raise EngineUnavailable("No engine is ready.")
        return names[0]

    @property
    def known(self) -> set[str]:
        return {*self._config.models, *self._models.names()}

    def check(self, name: str) -> None:
        """Raises `ModelNotFound` if the model is not known and no engine may turn out to serve it."""
        # While no model is known, or an engine may turn out to serve this one, its absence is not permanent.
        if (known := self.known) and name not in known and not self._pool.may_serve(name):
            raise ModelNotFound(f"The model {name!r} does not exist.", param="model")

    def tokenizer_model(self, requested: str | None) -> ServedModel:
        """The model of a request that needs its tokenizer but no engine. Raises `InvalidRequest`, `ModelNotFound`,
        and `EngineUnavailable` if no engine has served it yet."""
        name = self.name(requested)
        self.check(self.base_name(name))
        return self.get(name)

    def _base_of(self, lora: KnownLora) -> str | None:
        known = self.known
        if lora.base_model is not None:
            return self._models.first_names.get(lora.base_model, lora.base_model)
        return next(iter(known)) if len(known) == 1 else None

    def _engine_models(self) -> list[str]:
        names = {*self._pool.model_names(), *self._config.models}
        if self._config.deadlines.scale_from_zero > 0:
            names.update(self._models.names())
        return sorted(names)


class Call(Protocol):
    @property
    def num_prompts(self) -> int: ...

    @property
    def num_choices(self) -> int:
        """Number of choices of each prompt."""
        ...


class Trace(Protocol):
    def span(self, name: str) -> AbstractContextManager[Any]: ...


class AcceptedRequest(Protocol):
    """What admission reads of a request."""

    @property
    def call(self) -> Call: ...

    @property
    def caller(self) -> Caller: ...

    @property
    def trace(self) -> Trace: ...

    @property
    def rank(self) -> int:
        """Order among the caller's requests, smaller first."""
        ...


class AdmissionControl:
    """Shared by all requests. `admit` begins and ends one request."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        pool: EnginePool,
        models: ModelRegistry,
        metrics: GatewayMetrics,
        demand: Demand,
    ) -> None:
        self.config = config
        self.pool = pool
        self.models = models
        self.lookup = ModelLookup(config, pool=pool, models=models)
        self.bounds = AdmissionBounds(
            max_requests=config.max_concurrent_requests,
            max_waiting=config.max_waiting_requests,
            max_queued_tokens=config.max_queued_tokens,
        )
        self.pixels = Bound(config.images.max_image_memory, "images", "bytes of unfinished requests' images")
        self.queue = RequestQueue(self.bounds, self._capacity, metrics, demand)
        self.session_queue = SessionQueue(self.bounds, metrics, demand, config.session_max_wait)
        self._metrics = metrics
        for model in config.models:
            self.queue.add_model(model)

    @property
    def ready(self) -> bool:
        """Whether the gateway accepts requests. Without an engine it does if requests can wait for the first one:
        an autoscaler starts that engine because of the queue's depth."""
        return self.pool.ready or self.config.deadlines.scale_from_zero > 0

    @contextmanager
    def admit(self, accepted: AcceptedRequest, ends_at: float) -> Iterator["AdmissionGuard"]:
        """`ends_at`: when the request's time is over, by `time.perf_counter`. Raises `RateLimited` and `Overloaded`."""
        caller, call = accepted.caller, accepted.call
        try:
            with caller.limiter.acquire() as lease:
                request = QueuedRequest(caller, call.num_prompts * call.num_choices, rank=accepted.rank)
                self.bounds.admit(request)
                guard = AdmissionGuard(self, request, lease, call.num_choices, ends_at, accepted.trace)
                try:
                    yield guard
                finally:
                    lease.used = guard.num_used_tokens
                    request.settle(guard.num_used_tokens)
                    self.bounds.release(request)
                    self.pixels.total -= guard.num_pixel_bytes
                    self.queue.capacity_changed()
        except Overloaded as error:
            if error.limit is not None:
                self._metrics.observe_rejection(error.limit)
            raise

    def _capacity(self, model: str, *, enough: int = sys.maxsize) -> int | None:
        """Sequences that the model's engines should get now, counted up to `enough`. None: no engine is usable."""
        capacity: int | None = None
        for engine in self.pool.engines:
            if engine.usable and engine.hello is not None and engine.hello.model.model_name == model:
                size, stats = engine.hello.model.max_num_seqs, engine.load_stats
                num_waiting = stats.num_waiting_reqs - stats.num_fetching_reqs
                capacity = (capacity or 0) + engine_capacity(size, load=engine.load, num_waiting=num_waiting)
                if capacity >= enough:
                    break
        return capacity


@dataclass(slots=True, eq=False)
class AdmissionGuard:
    """One admitted request, until the context of `AdmissionControl.admit` ends."""

    control: AdmissionControl
    request: QueuedRequest  # what the bounds and queues count of it
    lease: Lease  # of its key's limits
    num_choices: int  # of each prompt
    ends_at: float  # when the request's time is over, by `time.perf_counter`
    trace: Trace
    num_pixel_bytes: int = 0  # of its images
    num_used_tokens: int = 0  # of prompts and outputs; to be set before the end if the request was sent to an engine

    async def find_model(self, requested: str | None) -> ServedModel:
        """The model of this name, the only one for None. Waits for its first engine if the gateway scales from zero.
        Raises `InvalidRequest`, `ModelNotFound`, `EngineUnavailable`, `Overloaded` and `ShuttingDown`."""
        lookup, pool = self.control.lookup, self.control.pool
        name = lookup.name(requested)
        base = lookup.base_name(name)
        try:
            pool.check(base)
        except (ModelNotFound, EngineUnavailable) as error:
            self.request.cost = self.request.num_sequences * EXPECTED_OUTPUT
            await self._wait_for_engine(base, error)
        if base != name and pool.refuses_loras(base):
            raise EngineUnavailable(f"The engines of the model {base!r} run without --enable-lora.")
        return lookup.get(name)

    def hold_images(self, num_bytes: int) -> None:
        """Count the pixels of the request's images, until it ends. Raises `Overloaded`, but not for a request whose
        images are the only ones."""
        pixels = self.control.pixels
        if pixels.total and pixels.total + num_bytes > pixels.limit:
            raise pixels.error()
        pixels.total += num_bytes
        self.num_pixel_bytes += num_bytes

    async def wait_for_place(
        self, model: str, sessions: ModelSessions, hashes: Sequence[bytes], num_prompt_tokens: int
    ) -> Wait:
        """Wait until the conversation that a prompt with these blocks continues has a place in an engine's cache.
        Raises `Overloaded` and `ShuttingDown`."""
        self.request.num_tokens = self.num_choices * num_prompt_tokens
        self.request.cost = num_prompt_tokens + self.request.num_sequences * EXPECTED_OUTPUT
        return await self.control.session_queue.wait(model, sessions, hashes, self.request, self._at_most(float("inf")))

    async def wait_for_capacity(self, model: str, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Wait until the request may be sent to an engine; return at once if nothing waits and there is capacity.

        `num_prompt_tokens`: of all prompts. `max_tokens`: of a sequence's output; None: any number. Raises
        `RateLimited`, `Overloaded`, `QueueTimeout` and `ShuttingDown`.
        """
        expected = EXPECTED_OUTPUT if max_tokens is None else min(max_tokens, EXPECTED_OUTPUT)
        cost = num_prompt_tokens + self.request.num_sequences * expected
        self.lease.reserve(cost)
        queue = self.control.queue
        if queue.has_capacity(model):
            return
        self.request.num_tokens, self.request.cost = self.num_choices * num_prompt_tokens, cost
        await queue.wait_for_capacity(model, self.request, self._at_most(self.control.config.deadlines.queue))

    async def _wait_for_engine(self, name: str, reason: ModelNotFound | EngineUnavailable) -> None:
        """`reason`: why there is none."""
        control = self.control
        control.lookup.check(name)
        seconds = control.config.deadlines.scale_from_zero
        if name not in control.lookup.known or not seconds:
            if isinstance(reason, EngineUnavailable):
                raise reason
            raise EngineUnavailable(f"No engine is ready for the model {name!r}.")
        with self.trace.span("scale_from_zero"):
            await control.queue.wait_for_engine(name, self.request, self._at_most(seconds))

    def _at_most(self, seconds: float) -> float:
        """Return how long to wait: as long as the request's time is not over, but not more than `seconds`."""
        return min(seconds, self.ends_at - time.perf_counter())


def engine_capacity(max_num_seqs: int, *, load: int, num_waiting: int) -> int:
    """Requests that an engine should get now: those that fill its batch, and an eighth of a batch to wait in it.

    An engine serves first come, first served: what has been sent cannot be reordered. Those that wait in it take the
    slots of requests that end before the gateway learns of it, a step or two later. An engine in which more wait lacks
    KV cache or time for prompts, and gets none. `load`: running and waiting. `num_waiting`: without those that wait for
    blocks from other engines.
    """
    extra = max(1, max_num_seqs // 8)
    return 0 if num_waiting > extra else max(0, max_num_seqs + extra - load)
