"""Admission control: API key limits, gateway limits, waiting for a model, queueing."""

from collections.abc import Iterator
from contextlib import contextmanager
from sys import maxsize

from proa_gateway.admission.bounds import Admission, Ticket
from proa_gateway.admission.capacity import model_room
from proa_gateway.admission.fair_limit import Claim
from proa_gateway.admission.fair_queue import Entry
from proa_gateway.admission.rate_limits import Lease
from proa_gateway.admission.waiting_room import Waiter, WaitingRoom
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.model_registry import ModelRegistry, ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import EngineUnavailable, InvalidRequest, ModelNotFound, Overloaded
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.openai.request_context import RequestContext

# Tokens that a request is taken to generate at most, until it has: few use up a large `max_tokens`.
EXPECTED_OUTPUT = 256


class AdmissionControl:
    """What all requests share; `visit` stands for one request's coming and going."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        pool: EnginePool,
        models: ModelRegistry,
        metrics: GatewayMetrics,
    ) -> None:
        self.waiting = WaitingRoom(
            lambda model, enough=maxsize: model_room(pool.engines, model, enough=enough),
            metrics,
        )
        self._config = config
        self._pool = pool
        self._models = models
        self._metrics = metrics
        self.admission = Admission(
            max_requests=config.max_concurrent_requests,
            max_waiting=config.max_waiting_requests,
            max_queued_tokens=config.max_queued_tokens,
        )
        for model in config.models:
            self.waiting.know(model)

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here. A gateway that holds them until an engine is up is: somebody must
        count them for the first engine to be started."""
        return self._pool.ready or self._config.deadlines.scale_from_zero > 0

    def model_names(self) -> list[str]:
        """Names that requests may have, sorted."""
        names = {*self._pool.model_names(), *self._config.models}
        if self._config.deadlines.scale_from_zero > 0:
            names.update(self._models.names())
        return sorted(names)

    @contextmanager
    def visit(self, context: RequestContext, num_sequences: int) -> Iterator["AdmissionGuard"]:
        """Raises `RateLimited` and `Overloaded`."""
        caller = context.caller
        claim = Claim(
            flow=caller.name,
            priority=caller.priority,
            rank=context.request.priority or 0,
            weight=caller.weight,
        )
        try:
            with caller.usage.lease() as lease, self.admission.admit(claim, num_sequences) as ticket:
                visit = AdmissionGuard(context, self.waiting, lease, ticket, seconds=self._config.deadlines.queue)
                try:
                    yield visit
                finally:
                    visit.end()
        except Overloaded as error:
            if error.limit is not None:
                self._metrics.observe_rejection(error.limit)
            raise

    async def model(self, context: RequestContext, visit: "AdmissionGuard") -> ServedModel:
        """The model that the request names, held until an engine of it is up where the gateway is to do so. Raises
        `ModelNotFound`, `EngineUnavailable` and what `WaitingRoom.hold` raises."""
        name = context.request.model
        if name is None:
            name = self._only_model()
        try:
            self._pool.check(name)
        except (ModelNotFound, EngineUnavailable):
            await self._hold(name, context, visit.ticket)
        return self._models.get(name)

    def _only_model(self) -> str:
        names = self._pool.model_names() or self.model_names()
        if len(names) > 1:
            raise InvalidRequest(f"model must be one of {', '.join(names)}.", param="model")
        if not names:
            raise EngineUnavailable("No engine is ready.")
        return names[0]

    async def _hold(self, name: str, context: RequestContext, ticket: Ticket) -> None:
        known = name in self._config.models or name in self._models.names()
        if not known and self._hears_of_all(name):
            raise ModelNotFound(f"The model {name!r} does not exist.", param="model")
        seconds = self._config.deadlines.scale_from_zero
        if not known or not seconds:
            raise EngineUnavailable(f"No engine is ready for the model {name!r}.")
        with context.trace.span("scale_from_zero"):
            await self.waiting.hold(name, ticket, min(seconds, context.seconds_left))

    def _hears_of_all(self, name: str) -> bool:
        """Whether a name that is not known cannot be that of an engine which has yet to say what it serves."""
        return bool(self._config.models or self._models.names()) and not self._pool.may_serve(name)


class AdmissionGuard:
    """One request's stay, from its admission to its end."""

    def __init__(
        self,
        context: RequestContext,
        waiting: WaitingRoom,
        lease: Lease,
        ticket: Ticket,
        *,
        seconds: float,
    ) -> None:
        self.ticket = ticket
        self._context = context
        self._waiting = waiting
        self._lease = lease
        self._seconds = seconds
        self._turn: Entry[Waiter] | None = None

    async def turn(self, model: str, num_prompt_tokens: int, num_sequences: int, max_tokens: int | None) -> None:
        """Until the engines should get the request; at once while they have room. Raises `RateLimited` and what
        `WaitingRoom.wait` raises."""
        num_choices = num_sequences // len(self._context.prompts)
        cost = num_prompt_tokens + num_sequences * min(max_tokens or EXPECTED_OUTPUT, EXPECTED_OUTPUT)
        self._lease.reserve(cost)
        if self._waiting.may_pass(model):
            return
        seconds = min(self._seconds, self._context.seconds_left)
        num_tokens = num_choices * num_prompt_tokens
        self._turn = await self._waiting.wait(model, self.ticket, seconds, num_tokens=num_tokens, cost=cost)

    def end(self) -> None:
        """Settles what it has cost, and lets others in."""
        if self._context.generation is not None:
            usage = self._context.usage
            self._lease.used = usage.prompt_tokens + usage.completion_tokens
        if self._turn is not None:
            self._turn.settle(self._lease.used)
        self._waiting.changed()
