"""RequestAttempts: one sequence's way from engine to engine, from its first attempt to its last token.

Says whether it goes on after a failure, when, and with what; sends nothing. Knows nothing of pools, sessions or text.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from proa_gateway.engines.client import EngineClient
from proa_gateway.engines.retries import MAX_ATTEMPTS, RetryBudget, pause_before
from proa_gateway.errors import EngineLost, GatewayError
from proa_gateway.observability.telemetry import Attempt
from proa_gateway.routing.hints import RoutingHints
from proa_gateway.types import EngineRequest, ModelInfo


@dataclass(slots=True, eq=False)
class RequestAttempts:
    """Times are the event loop's, in seconds. What is counted begins anew with each token."""

    request: EngineRequest
    wish: RoutingHints
    since: float = 0.0  # its start or its last progress that was looked at
    num_received: int = 0  # tokens, when last looked at
    num_attempts: int = 0  # in all
    tried: list[str] = field(default_factory=list)  # addresses, since the last token
    num_lost: int = 0  # engines
    num_rejected: int = 0
    failed_at: float | None = None  # the first of those
    loss: GatewayError | None = None  # of an engine that had given tokens
    model: ModelInfo | None = None  # of the last engine
    num_cached_tokens: int = 0  # of the prompt, as expected of the last engine
    attempt: Attempt | None = None
    abort: Callable[[], None] | None = None
    moving: asyncio.Task[None] | None = None

    def progressed(self, num_received: int, now: float) -> None:
        """So many tokens have come by now."""
        if num_received > self.num_received:
            self.num_received, self.since = num_received, now
            self.num_lost, self.num_rejected = 0, 0
            self.failed_at = self.loss = None
            self.tried = self.tried[-1:]

    def next_request(self, received: Sequence[int]) -> EngineRequest:
        """What the next engine is asked for. An engine that still holds the last attempt must not mistake this one
        for it."""
        if not self.num_attempts:
            return self.request
        params = self.request.sampling_params
        if received and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        request_id = f"{self.request.request_id}.{self.num_attempts + 1}"
        return replace(self.request, request_id=request_id, sampling_params=params, resumed_token_ids=received)

    def sent(self, engine: EngineClient) -> None:
        self.num_attempts += 1
        self.tried.append(engine.address)
        self.model = engine.hello.model if engine.hello is not None else None

    def failed(self, error: GatewayError, now: float, budget: RetryBudget, jitter: float) -> float | None:
        """How long to wait before the next attempt; None: there is none.

        A sequence that has tokens is only given up when engines die of it, or when its time is over. One that has none
        can still be answered with an error that says when to come again.
        """
        if self.failed_at is None:
            self.failed_at = now
        if isinstance(error, EngineLost):
            self.num_lost += 1
            if self.num_received:
                self.loss = self.loss or error
        else:
            self.num_rejected += 1
        fruitless = self.num_lost if self.num_received else self.num_lost + self.num_rejected
        if fruitless >= MAX_ATTEMPTS:
            return None
        if isinstance(error, EngineLost):
            return 0.0
        if not self.num_received and not budget.spend():
            return None
        return pause_before(self.num_rejected, jitter)

    def unfit(self, engines: Iterable[EngineClient]) -> list[str]:
        """Addresses of those that could not go on: tokens, where there are any, must mean the same to them, and be what
        they would have said."""
        return [
            engine.address
            for engine in engines
            if self.model is not None and engine.hello is not None and not self._fits(engine.hello.model, self.model)
        ]

    def _fits(self, other: ModelInfo, model: ModelInfo) -> bool:
        same_tokens = (other.tokenizer_digest, other.vocab_size) == (model.tokenizer_digest, model.vocab_size)
        same_weights = other.chain.root == model.chain.root
        return same_tokens and (same_weights or not self.num_received)
