"""Fetches of KV blocks between engines, from when a request is sent until its first output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from proa.contract import EngineCoreOutput, KvFetch, KvSource
from proa_gateway.engines.client import EngineClient
from proa_gateway.engines.session import OutputSink, SentRequest
from proa_gateway.errors import EngineLost, GatewayError
from proa_gateway.observability.kv_metrics import FetchKind
from proa_gateway.observability.telemetry import AttemptSpan
from proa_gateway.routing.kv_sources import Pair


class Supplier(Protocol):
    """A request at the source of a fetch, which computes the blocks that are fetched."""

    @property
    def num_cached_tokens(self) -> int | None:
        """Cached tokens of the prompt, as the source reported them. None: not known."""

    def release(self) -> None:
        """The fetch has ended, or no request waits for it any more."""


@dataclass(slots=True, eq=False)
class OpenFetch:
    """A fetch that one or more requests at one engine wait for, until the first output of the request that began it.
    Others may need fewer of the blocks."""

    kind: FetchKind
    pair: Pair  # addresses of source and target
    addresses: Sequence[str]  # of the source's movers
    blocks: Sequence[bytes]  # the prompt's leading ones that the source has, or is about to compute
    num_cached: int  # of them, at the target
    wait_ms: int = 0  # as in `KvSource`
    supplier: Supplier | None = None  # None: the source has the blocks already
    num_waiting: int = field(default=0, init=False)  # requests
    is_open: bool = field(default=True, init=False)  # False: its end was observed, or no request waits for it any more

    def source(self, num_blocks: int) -> KvSource:
        return KvSource(addresses=tuple(self.addresses), num_blocks=num_blocks, wait_ms=self.wait_ms)


class FetchListener(Protocol):
    def fetched(self, fetch: OpenFetch, result: KvFetch | None) -> None:
        """The first output of the request that began the fetch has come. `result` None: there was nothing to fetch."""

    def leave(self, fetch: OpenFetch) -> None:
        """A request no longer waits for the fetch."""


class FetchingSink:
    """The sink of a request with a KV source. Forwards outputs to the request's sequence; the first one ends the fetch,
    and later ones go to the sequence directly."""

    __slots__ = ("_began", "_fetch", "_listener", "_sequence", "_span", "output", "source", "token")

    def __init__(
        self, fetch: OpenFetch, source: KvSource, listener: FetchListener, sequence: OutputSink, span: AttemptSpan
    ) -> None:
        self.source = source
        self.token: Callable[[int], None] = self._first_token  # the sequence's own, after the first output
        self.output: Callable[[EngineCoreOutput], None] = self._first_output  # likewise
        self._fetch: OpenFetch | None = fetch
        self._listener = listener
        self._sequence = sequence
        self._span = span
        self._began = not fetch.num_waiting  # its request began the fetch; others joined it
        fetch.num_waiting += 1
        span.set_kv_source(fetch.pair[0])

    @property
    def is_open(self) -> bool:
        """Whether the request's first output has not come yet."""
        return self._fetch is not None

    def draining(self) -> None:
        self._sequence.draining()

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        self.close()
        self._sequence.failed(error, retryable=retryable)

    def close(self) -> None:
        """The request has ended, or no longer waits."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._listener.leave(fetch)

    def _first_token(self, token_id: int) -> None:
        self._end_fetch(None)
        self._sequence.token(token_id)

    def _first_output(self, output: EngineCoreOutput) -> None:
        if output.new_token_ids or output.is_finished:
            if self._fetch is not None and self._fetch.supplier is not None:
                _set_cached_tokens(output, self._fetch.supplier)
            self._end_fetch(output.fetch)
        self._sequence.output(output)

    def _end_fetch(self, result: KvFetch | None) -> None:
        self.token, self.output = self._sequence.token, self._sequence.output
        if self._fetch is not None:
            self._span.set_fetched_tokens(result.num_tokens if result is not None else 0)
            if self._began:
                self._listener.fetched(self._fetch, result)
        self.close()


def _set_cached_tokens(output: EngineCoreOutput, supplier: Supplier) -> None:
    """Count tokens that the supplier has computed for this request as computed: for the engine that fetched their
    blocks they were cached."""
    if output.num_cached_tokens is not None and output.fetch is not None:
        num_held = max(0, output.num_cached_tokens - output.fetch.num_tokens)
        output.num_cached_tokens = max(num_held, supplier.num_cached_tokens or 0)


class LeavingRequest:
    """A request on an engine that drains, whose sequence moves to another engine. The request, and so its engine, goes
    on until the other engine has fetched its blocks."""

    num_cached_tokens = None

    def __init__(self, engine: EngineClient, sent: SentRequest, span: AttemptSpan) -> None:
        sent.ignore()
        self.engine = engine
        self._sent = sent
        self._span: AttemptSpan | None = span

    def release(self) -> None:
        self._sent.abort()
        span, self._span = self._span, None
        if span is not None:
            span.finish()


PrefillOutcome = Literal["used", "unused", "rejected", "lost", "aborted"]


class RemotePrefill:
    """A request that computes a prompt on a prefill engine, for requests at other engines that fetch the blocks.

    These requests do not depend on it: they compute the blocks that do not come.
    """

    def __init__(self, num_tokens: int, span: AttemptSpan, on_end: Callable[["RemotePrefill"], None]) -> None:
        """`num_tokens`: that it has to compute. `on_end` is called once, when it has failed or no fetch uses it any
        more."""
        self.num_tokens = num_tokens  # 0 once they are computed
        self.num_fetches = 0  # that wait for its blocks
        self.num_cached_tokens: int | None = None  # None: not known yet
        self.outcome: PrefillOutcome = "aborted"  # for metrics; "aborted" until it is known
        self.error: GatewayError | None = None  # why it failed
        self.sent: SentRequest | None = None  # None until it is sent
        self.fetching: FetchingSink | None = None  # if it has a KV source itself
        self._span: AttemptSpan | None = span
        self._on_end: Callable[[RemotePrefill], None] | None = on_end

    # OutputSink

    def token(self, token_id: int) -> None:
        """Not called: a prefill generates no tokens."""

    def output(self, output: EngineCoreOutput) -> None:
        if output.is_finished:
            self.num_tokens, self.num_cached_tokens = 0, output.num_cached_tokens
            self._finish_span()

    def draining(self) -> None:
        """The engine computes what it has begun."""

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        self.outcome, self.error = "lost" if isinstance(error, EngineLost) else "rejected", error
        self._finish_span(type(error).__name__, error.message)
        self._end()

    # Supplier

    def release(self) -> None:
        self.num_fetches -= 1
        if self.num_fetches == 0:
            if self.sent is not None:
                self.sent.abort()
            if self.fetching is not None:
                self.fetching.close()
            self._finish_span("aborted", "aborted by the gateway")
            self._end()

    # Private

    def _end(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    def _finish_span(self, error_type: str | None = None, message: str = "") -> None:
        span, self._span = self._span, None
        if span is not None:
            span.finish(error_type, message)
