"""The attempts of one engine request, and the deadlines of all requests of one HTTP request."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from proa.contract import EngineCoreRequest, Lora, ModelInfo
from proa_gateway.config import Deadlines
from proa_gateway.engines.client import EngineClient
from proa_gateway.engines.kv_fetches import FetchingSink, LeavingRequest
from proa_gateway.engines.session import SentRequest
from proa_gateway.errors import (
    DeadlineExceeded,
    EngineLost,
    EngineTimeout,
    GatewayError,
    InvalidRequest,
    LoraNotLoaded,
    Overloaded,
)
from proa_gateway.observability.telemetry import AttemptSpan
from proa_gateway.routing.policies import RoutingHints
from proa_gateway.sessions.engine_sessions import RunningTurn

HEADER = "x-request-timeout"
MAX_ATTEMPTS = 3
"""Attempts without a new token between them, so that a request that crashes engines does not reach all of them."""
MAX_OVERLOADED = 0.5
"""Seconds after which a request that an engine rejects as overloaded is not sent again: it has waited in a queue of the
engine, and would wait again."""
FIRST_BACKOFF = 0.05  # seconds
LAST_BACKOFF = 1.0


def request_timeout(headers: Mapping[str, str], maximum: float) -> float:
    """Return the seconds that a request may take: what its header says, at most `maximum`. Raises `InvalidRequest`."""
    text = headers.get(HEADER)
    if text is None:
        return maximum
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidRequest(f"{HEADER} must be a number of seconds above zero, got {text[:40]!r}.", param=HEADER)
    return min(seconds, maximum)


class RetryBudget:
    """Limits the retries of rejected requests to a share of all requests.

    Each request adds `share` of a retry, up to `reserve`, so that retries are possible under low traffic.
    """

    __slots__ = ("_balance", "_reserve", "_share")

    def __init__(self, *, share: float = 0.2, reserve: float = 20.0) -> None:
        self._share = share
        self._reserve = reserve
        self._balance = reserve  # retries that may be made now

    def add_request(self) -> None:
        self._balance = min(self._reserve, self._balance + self._share)

    def try_spend(self) -> bool:
        """Take one retry from the budget. Return False if there is none left."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True


def backoff(retry: int, jitter: float) -> float:
    """Return the seconds to wait before the `retry`-th retry, counted from 1.

    Exponential. `jitter` (0 to 1) moves it within the upper half, so that requests rejected together are not sent again
    together.
    """
    seconds: float = min(FIRST_BACKOFF * 2.0 ** min(retry - 1, 10), LAST_BACKOFF)
    return seconds * (0.5 + jitter / 2)


@dataclass(slots=True, eq=False)
class RequestAttempts:
    """State of one sequence. Times are the event loop's, in seconds. Failures are counted since the last token."""

    request: EngineCoreRequest  # of the first attempt; `set_lora` changes it
    hints: RoutingHints
    last_progress: float = 0.0  # when it was started, or `update_progress` last found new tokens
    num_received: int = 0  # tokens, at the last `update_progress`
    num_attempts: int = 0  # in total
    tried: list[str] = field(default_factory=list)  # engine addresses, from that of the last token on
    num_lost: int = 0  # attempts whose engine was lost, or did not have the adapter
    num_rejected: int = 0  # attempts that failed otherwise
    failed_at: float | None = None  # time of the first of these failures
    lost_error: GatewayError | None = None  # of the first engine lost after it sent tokens
    engine: EngineClient | None = None  # the last one
    model: ModelInfo | None = None  # of that engine
    num_cached_tokens: int = 0  # of the prompt, as expected when the last engine was chosen
    span: AttemptSpan | None = None  # of the attempt in flight
    sent: SentRequest | None = None  # the attempt in flight
    fetching: FetchingSink | None = None  # of that attempt, if it has a KV source
    turn: RunningTurn | None = None  # of a session, in that attempt
    leaving: LeavingRequest | None = None  # the attempt before, if the next one fetches the blocks of it
    resend_task: asyncio.Task[None] | None = None  # sends the next attempt, or loads the adapter first

    def is_loaded(self, engine: EngineClient) -> bool:
        """Whether the engine has the request's adapter. The first engine that has it decides on its content."""
        loaded = engine.loras.get(self.hints.lora) if self.hints.lora is not None else None
        if loaded is not None and not self.num_received:
            self.set_lora(loaded)
        return loaded is not None

    def set_lora(self, lora: Lora) -> None:
        """The adapter has another content, or its digest is known now. Only before the first token."""
        if self.hints.lora is None or self.hints.lora.digest != lora.digest:
            self.hints = RoutingHints(session_id=self.hints.session_id, lora=lora)  # no block has its hash yet
            self.request = replace(self.request, lora_digest=lora.digest)

    def update_progress(self, num_received: int, now: float) -> None:
        """Reset the failure counts if `num_received` has grown."""
        if num_received > self.num_received:
            self.num_received, self.last_progress = num_received, now
            self.num_lost, self.num_rejected = 0, 0
            self.failed_at = self.lost_error = None
            self.tried = self.tried[-1:]

    def next_request(self, received: Sequence[int]) -> EngineCoreRequest:
        """Return the request for the next attempt, which continues after the tokens received so far.

        It has an ID of its own, because an engine may still be running the previous attempt.
        """
        if not self.num_attempts:
            return self.request
        params = self.request.sampling_params
        if received and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        request_id = f"{self.request.request_id}.{self.num_attempts + 1}"
        return replace(self.request, request_id=request_id, sampling_params=params, resumed_token_ids=received)

    def leave(self) -> None:
        """Drop the outputs of the attempt in flight. It goes on until the next one, which must be sent now, has fetched
        its blocks."""
        assert self.sent is not None
        assert self.span is not None
        assert self.engine is not None
        self.leaving = LeavingRequest(self.engine, self.sent, self.span)
        self.sent = self.span = None

    def record_sent(self, engine: EngineClient) -> None:
        self.num_attempts += 1
        self.engine = engine
        self.tried.append(engine.address)
        self.model = engine.hello.model if engine.hello is not None else None

    def record_not_sent(self, engine: EngineClient) -> None:
        """The engine was chosen, but does not get the request."""
        self.tried.append(engine.address)

    def record_failure(self, error: GatewayError, now: float, budget: RetryBudget, jitter: float) -> float | None:
        """Return the seconds to wait before the next attempt, None if the sequence is given up.

        A sequence with tokens is given up only after `MAX_ATTEMPTS` lost engines, or engines without its adapter (or by
        its deadlines); rejections do not count. Without tokens rejections count too, because the client can still get a
        429 or 503.
        """
        if self.failed_at is None:
            self.failed_at = now
        if isinstance(error, EngineLost | LoraNotLoaded):
            self.num_lost += 1
            if self.num_received:
                self.lost_error = self.lost_error or error
        else:
            self.num_rejected += 1
        num_failures = self.num_lost if self.num_received else self.num_lost + self.num_rejected
        if num_failures >= MAX_ATTEMPTS:
            return None
        if isinstance(error, EngineLost | LoraNotLoaded):
            return 0.0
        if not self.num_received:
            has_waited = isinstance(error, Overloaded) and now - self.last_progress > MAX_OVERLOADED
            if has_waited or not budget.try_spend():
                return None
        return backoff(self.num_rejected, jitter)

    def cancel(self, received: Sequence[int]) -> None:
        """Abort the attempt in flight, which has these output tokens, and do not send another."""
        if self.turn is not None:
            self.turn.end(received)
        if self.resend_task is not None:
            self.resend_task.cancel()
        if self.sent is not None:
            self.sent.abort()
        self.end_fetch()
        if self.span is not None:
            self.span.finish("aborted", "aborted by the gateway")

    def end_fetch(self) -> None:
        """The attempt in flight does not wait for blocks of other engines any more."""
        if self.fetching is not None:
            self.fetching.close()
            self.fetching = None
        if self.leaving is not None:
            self.leaving.release()
            self.leaving = None

    def incompatible(self, engines: Iterable[EngineClient]) -> list[str]:
        """Return the addresses of engines that cannot start or continue the sequence.

        They do not support its grammar, its adapter, its images or audios, its embeddings or its pooling task, or their
        tokenizer or vocabulary differs from the last engine's or, if there are tokens already, their weights.
        """
        return [
            engine.address
            for engine in engines
            if engine.hello is not None and not self._is_compatible(engine.hello.model)
        ]

    def takes_embeds(self, other: ModelInfo) -> bool:
        """Return whether an engine takes the prompt's embeddings, if it has some."""
        return all(embeds.size == other.prompt_embeds_size for embeds in self.request.prompt_embeds)

    def _is_compatible(self, other: ModelInfo) -> bool:
        if self.request.sampling_params.grammar is not None and not other.grammars:
            return False
        if self.request.lora_name and not other.max_loras:
            return False
        if (self.request.images and other.images is None) or (self.request.audios and other.audios is None):
            return False
        if self.request.prompt_embeds and not self.takes_embeds(other):
            return False
        pooling = self.request.pooling_params
        if pooling.task not in other.pooling_tasks if pooling is not None else other.pooling_only:
            return False
        if (model := self.model) is None:
            return True
        if self.request.images and other.images != model.images:
            return False
        if self.request.audios and other.audios != model.audios:
            return False
        same_tokens = (other.tokenizer_digest, other.vocab_size) == (model.tokenizer_digest, model.vocab_size)
        same_weights = (other.model, other.revision) == (model.model, model.revision)
        return same_tokens and (same_weights or not self.num_received)


@dataclass(frozen=True, slots=True)
class RequestDeadlines:
    """Deadlines of one HTTP request. Times are the event loop's, in seconds."""

    deadlines: Deadlines  # those for the first and for the next token are used
    ends_at: float  # the end of the total time

    def until_next_check(self, now: float) -> float:
        return max(0.0, min(self.deadlines.first_token / 4, self.deadlines.next_token / 4, self.ends_at - now))

    def error(self, sequences: Iterable[RequestAttempts], now: float) -> GatewayError | None:
        """`DeadlineExceeded` after the total time, `EngineTimeout` if a sequence got no token in time, else None."""
        if now >= self.ends_at:
            return DeadlineExceeded("The answer was not finished within the request's time.")
        for attempts in sequences:
            limit = self.deadlines.next_token if attempts.num_received else self.deadlines.first_token
            if now - attempts.last_progress > limit:
                what = "next" if attempts.num_received else "first"
                return EngineTimeout(f"The engine sent no {what} token within {limit:g} s.")
        return None
