"""KvExchange: lets engines fetch blocks of prompts from other engines of the pool, and observes these fetches."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from proa.contract import EngineCoreOutput, KvFetch, KvSource
from proa_gateway.engines.client import EngineClient, EngineState
from proa_gateway.engines.session import OutputSink
from proa_gateway.errors import GatewayError
from proa_gateway.observability.metrics import FetchKind, GatewayMetrics
from proa_gateway.observability.telemetry import AttemptSpan
from proa_gateway.routing.hints import RoutingHints
from proa_gateway.routing.kv_sources import FetchRates, Pair, Source, Target, choose_source, common_length, is_faster
from proa_gateway.routing.router import Router

_DRAINING_COST = -1.0  # below every load: blocks of an engine that drains will be lost


@dataclass(slots=True, eq=False)
class OpenFetch:
    """A fetch that one or more requests at one engine wait for, until the first output of any of them."""

    kind: FetchKind
    pair: Pair
    addresses: Sequence[str]  # of the source's movers
    blocks: Sequence[bytes]  # the prompt's leading ones that the source has
    num_cached: int  # of them, at the target
    num_waiting: int = field(default=0, init=False)  # requests
    is_open: bool = field(default=True, init=False)


class FetchingSink:
    """The sink of a request with a KV source. Forwards outputs to the request's sequence; the first one ends the fetch,
    and later ones go to the sequence directly."""

    __slots__ = ("_exchange", "_fetch", "_sequence", "_span", "output", "source", "token")

    def __init__(
        self, exchange: "KvExchange", fetch: OpenFetch, num_blocks: int, sequence: OutputSink, span: AttemptSpan
    ) -> None:
        self.source = KvSource(addresses=tuple(fetch.addresses), num_blocks=num_blocks)
        self.token: Callable[[int], None] = self._first_token
        self.output: Callable[[EngineCoreOutput], None] = self._first_output
        self._exchange = exchange
        self._fetch: OpenFetch | None = fetch
        self._sequence = sequence
        self._span = span

    def failed(self, error: GatewayError, *, retryable: bool) -> None:
        self.close()
        self._sequence.failed(error, retryable=retryable)

    def close(self) -> None:
        """The request has ended, or no longer waits."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._exchange.leave(fetch)

    def _first_token(self, token_id: int) -> None:
        self._end_fetch(None)
        self._sequence.token(token_id)

    def _first_output(self, output: EngineCoreOutput) -> None:
        if output.new_token_ids or output.finish_reason is not None:
            self._end_fetch(output.fetch)
        self._sequence.output(output)

    def _end_fetch(self, fetched: KvFetch | None) -> None:
        self.token, self.output = self._sequence.token, self._sequence.output
        if self._fetch is not None:
            self._span.set_fetched_tokens(fetched.num_tokens if fetched is not None else 0)
            self._exchange.fetched(self._fetch, fetched)
        self.close()


class KvExchange:
    """Engines exchange blocks if the fingerprints of their caches and their numbers of ranks are equal."""

    def __init__(self, router: Router, metrics: GatewayMetrics, *, bandwidth: float) -> None:
        """`bandwidth`: bytes per second between two engines that have not exchanged any lately."""
        self._router = router
        self._metrics = metrics
        self._rates = FetchRates(bandwidth, time.monotonic)
        self._engines: Collection[EngineClient] = ()
        self._peers: dict[str, Sequence[EngineClient]] = {}  # by address
        self._open: dict[str, list[OpenFetch]] = {}  # by the target's address

    @property
    def num_open(self) -> int:
        """Fetches whose end is not known yet."""
        return sum(map(len, self._open.values()))

    def watch(self, engines: Collection[EngineClient]) -> None:
        """Set the engines, a live view of the pool's."""
        self._engines = engines

    def engines_changed(self) -> None:
        """An engine's session began or ended, or it drains."""
        self._peers.clear()

    def begin(
        self, engine: EngineClient, num_cached_tokens: int, hints: RoutingHints, sequence: OutputSink, span: AttemptSpan
    ) -> FetchingSink | None:
        """Choose from where the engine fetches blocks of a request that is about to be sent to it.

        Return the sink of the request, which has its KV source; None if all blocks that are missing are computed.
        `num_cached_tokens`: of the prompt, expected in the engine's cache.
        """
        peers = self._peers.get(engine.address)
        if peers is None:
            peers = self._peers[engine.address] = self._peers_of(engine)
        if not peers or not hints.reusable:
            return None
        fetch = self._join(engine, hints) or self._fetch_prefix(engine, num_cached_tokens, hints, peers)
        if fetch is None:
            return None
        fetch.num_waiting += 1
        self._metrics.observe_kv_source(fetch.kind)
        span.set_kv_source(fetch.pair[0])
        return FetchingSink(self, fetch, common_length(hints.reusable, fetch.blocks), sequence, span)

    def fetched(self, fetch: OpenFetch, result: KvFetch | None) -> None:
        """The first output of a request has come. `result` None: the engine had nothing to fetch."""
        if not fetch.is_open:
            return
        self._end(fetch)
        if result is None:
            return
        seconds = max(result.ended - result.started, 0.0)
        self._metrics.observe_kv_fetch(
            fetch.kind, num_tokens=result.num_tokens, num_bytes=result.num_bytes, seconds=seconds
        )
        if result.error:
            self._rates.add_failure(fetch.pair)
        else:
            self._rates.add(fetch.pair, result.num_bytes, seconds)

    def leave(self, fetch: OpenFetch) -> None:
        """A request no longer waits for the fetch."""
        fetch.num_waiting -= 1
        if not fetch.num_waiting:
            self._end(fetch)

    def _peers_of(self, engine: EngineClient) -> Sequence[EngineClient]:
        """Return the other engines with a session, also draining ones, whose blocks the engine can use."""
        key = _exchange_key(engine)
        return [one for one in self._engines if one is not engine and _exchange_key(one) == key] if key else []

    def _join(self, engine: EngineClient, hints: RoutingHints) -> OpenFetch | None:
        """Return a fetch that brings the engine blocks of this prompt too, for which the index expects it to have them
        already: a request that does not wait for the fetch would compute them."""
        for fetch in self._open.get(engine.address, ()):
            if common_length(hints.reusable, fetch.blocks) > fetch.num_cached:
                return fetch
        return None

    def _fetch_prefix(
        self, engine: EngineClient, num_cached_tokens: int, hints: RoutingHints, peers: Iterable[EngineClient]
    ) -> OpenFetch | None:
        """Begin a fetch from the engine that has more blocks of the prompt than the target, if that is faster than
        computing them."""
        target = _target(engine, num_cached_tokens, peers)
        best = Source(address="", num_blocks=hints.num_reusable, rate=math.inf, load=0, is_draining=True)
        if target is None or not is_faster(target, best):
            return None
        costs = {one.address: _cost(one) for one in peers if not one.suspect and not one.is_asleep}
        holders = self._router.index.holders(hints.reusable, costs, target.num_cached)
        clients = {one.address: one for one in peers}
        sources = [
            Source(
                address=address,
                num_blocks=num_blocks,
                rate=self._rates.get((address, engine.address)),
                load=clients[address].load,
                is_draining=clients[address].state is EngineState.DRAINING,
            )
            for address, num_blocks in holders.items()
        ]
        chosen = choose_source(target, sources)
        if chosen is None:
            return None
        blocks = hints.reusable[: chosen.num_blocks]
        return self._start("hot_prefix", clients[chosen.address], engine, blocks, target.num_cached)

    def _start(
        self, kind: FetchKind, source: EngineClient, engine: EngineClient, blocks: Sequence[bytes], num_cached: int
    ) -> OpenFetch:
        fetch = OpenFetch(kind, (source.address, engine.address), _mover_addresses(source), blocks, num_cached)
        self._open.setdefault(engine.address, []).append(fetch)
        return fetch

    def _end(self, fetch: OpenFetch) -> None:
        if fetch.is_open:
            fetch.is_open = False
            address = fetch.pair[1]
            self._open[address].remove(fetch)
            if not self._open[address]:
                del self._open[address]


def _exchange_key(engine: EngineClient) -> tuple[bytes, int] | None:
    """Return what is equal for engines that exchange blocks. None if the engine exchanges none."""
    transfer = engine.hello.model.kv_transfer if engine.hello is not None else None
    return None if transfer is None else (transfer.fingerprint, len(transfer.ports))


def _cost(engine: EngineClient) -> float:
    return _DRAINING_COST if engine.state is EngineState.DRAINING else engine.load


def _mover_addresses(engine: EngineClient) -> Sequence[str]:
    transfer = engine.hello.model.kv_transfer if engine.hello is not None else None
    host, _, _ = engine.address.rpartition(":")
    return [] if transfer is None else [f"{host}:{port}" for port in transfer.ports]


def _target(engine: EngineClient, num_cached_tokens: int, peers: Iterable[EngineClient]) -> Target | None:
    """Describe the engine that fetches. None if its session has ended.

    An engine that has computed no prompt yet is taken for as fast as one of its peers, which have the same model.
    """
    if engine.hello is None or (transfer := engine.hello.model.kv_transfer) is None:
        return None
    block_size = engine.hello.model.block_size
    rates = (one.load_stats.prefill_tokens_per_second for one in (engine, *peers))
    return Target(
        block_size=block_size,
        block_bytes=transfer.block_bytes,
        num_cached=num_cached_tokens // block_size,
        num_waiting_tokens=engine.load_stats.num_waiting_tokens,
        prefill_rate=next((rate for rate in rates if rate), 0.0),
    )
