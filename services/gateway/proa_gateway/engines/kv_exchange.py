"""KvExchange: lets engines fetch blocks of prompts from other engines of the pool, and observes these fetches."""

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from proa.contract import EngineCoreRequest, KvFetch, SamplingParams
from proa_gateway.engines.attempts import RequestAttempts
from proa_gateway.engines.client import EngineClient, EngineState
from proa_gateway.engines.kv_fetches import FetchingSink, LeavingRequest, OpenFetch, RemotePrefill
from proa_gateway.engines.session import OutputSink
from proa_gateway.errors import EngineUnavailable, Overloaded
from proa_gateway.observability.kv_metrics import FetchKind, KvMetrics
from proa_gateway.observability.telemetry import AttemptSpan, RequestTrace
from proa_gateway.routing.kv_sources import (
    FetchRates,
    Prefiller,
    Source,
    Target,
    choose_source,
    common_length,
    is_faster,
    remote_wait,
)
from proa_gateway.routing.policies import RoutingHints
from proa_gateway.routing.router import Router

_DRAINING_COST = -1.0  # below every load: blocks of an engine that drains will be lost
_WAIT_MS = 2000  # for a block that the source is about to compute, beside its queue


class KvExchange:
    """Engines exchange blocks if the fingerprints of their caches and their numbers of ranks are equal."""

    def __init__(self, router: Router, metrics: KvMetrics, *, bandwidth: float, min_remote_prefill_tokens: int) -> None:
        """`bandwidth`: bytes per second between two engines that have not exchanged any lately.
        `min_remote_prefill_tokens`: prompts that lack fewer are not sent to prefill engines."""
        self._router = router
        self._metrics = metrics
        self._min_remote_prefill_tokens = min_remote_prefill_tokens
        self._rates = FetchRates(bandwidth, time.monotonic)
        self._engines: Collection[EngineClient] = ()  # the pool's, a live view
        self._peers: dict[str, Sequence[EngineClient]] = {}  # by address
        self._open: dict[str, list[OpenFetch]] = {}  # by the target's address
        self._prefills: dict[tuple[str, bytes], RemotePrefill] = {}  # by the engine's address and the last block

    @property
    def num_open(self) -> int:
        """Fetches whose end is not known yet, and prefills for them."""
        return sum(map(len, self._open.values())) + len(self._prefills)

    def watch(self, engines: Collection[EngineClient]) -> None:
        """Set the engines, a live view of the pool's."""
        self._engines = engines

    def engines_changed(self) -> None:
        """An engine's session began or ended, or it drains."""
        self._peers.clear()

    def begin(
        self,
        engine: EngineClient,
        request: EngineCoreRequest,
        attempts: RequestAttempts,
        sequence: OutputSink,
        trace: RequestTrace,
    ) -> FetchingSink | None:
        """Choose from where the engine fetches blocks of a request that is about to be sent to it, and send the request
        to a prefill engine too if that is faster.

        Return the sink of the request, which has its KV source; None if all blocks that are missing are computed.
        """
        peers = self._peers.get(engine.address)
        if peers is None:
            peers = self._peers[engine.address] = self._peers_of(engine)
        hints = attempts.hints
        if not peers or attempts.span is None:
            return None
        if (leaving := attempts.leaving) is not None:
            attempts.leaving = None
            return self._sink(_follow(leaving, engine, attempts), 0, sequence, attempts.span)
        if not hints.reusable:
            return None
        num_cached = attempts.num_cached_tokens
        fetch = self._join(engine, hints) or self._fetch_prefix(engine, num_cached, hints, peers)
        num_shared = 0 if fetch is None else common_length(hints.reusable, fetch.blocks)
        remote = self._prefill_elsewhere(engine, request, attempts, peers, num_shared, trace)
        if remote is not None:
            return self._sink(remote, 0, sequence, attempts.span)
        return None if fetch is None else self._sink(fetch, num_shared, sequence, attempts.span)

    def successors(self, attempts: RequestAttempts) -> Sequence[EngineClient]:
        """Return the engines that can continue a sequence and fetch its blocks, if its engine drains. None can before
        the first output if the attempt itself waits for blocks, or needs no cached ones."""
        engine, fetching = attempts.engine, attempts.fetching
        if engine is None or attempts.sent is None or (fetching is not None and fetching.is_open):
            return []
        if attempts.request.pooling_params is not None:
            return []
        if attempts.request.sampling_params.prompt_logprobs is not None and not attempts.num_received:
            return []
        length = attempts.model.max_model_len if attempts.model is not None else 0
        return [
            one
            for one in self._peers_of(engine)
            if one.usable
            and not one.suspect
            and (one.hello is not None and one.hello.model.max_model_len >= length)
            and self._rates.get((engine.address, one.address))
            and (attempts.hints.lora is None or one.loras.get(attempts.hints.lora) is not None)
        ]

    # FetchListener

    def fetched(self, fetch: OpenFetch, result: KvFetch | None) -> None:
        if not fetch.is_open:
            return
        if result is not None:
            seconds = max(result.ended - result.started, 0.0)
            self._metrics.observe_fetch(
                fetch.kind, num_tokens=result.num_tokens, num_bytes=result.num_bytes, seconds=seconds
            )
            if result.error:
                self._rates.add_failure(fetch.pair)
            else:
                self._rates.add(fetch.pair, result.num_bytes, seconds, waited=fetch.supplier is not None)
        if isinstance(fetch.supplier, RemotePrefill) and fetch.supplier.error is None:
            fetch.supplier.outcome = "used" if result is not None and result.num_tokens else "unused"
        self._end(fetch)

    def leave(self, fetch: OpenFetch) -> None:
        fetch.num_waiting -= 1
        if not fetch.num_waiting:
            self._end(fetch)

    # Private

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
        """Return a fetch from the engine that has more blocks of the prompt than the target, if that is faster than
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
        return _open_fetch("hot_prefix", clients[chosen.address], engine, blocks, target.num_cached)

    def _prefill_elsewhere(
        self,
        engine: EngineClient,
        request: EngineCoreRequest,
        attempts: RequestAttempts,
        peers: Iterable[EngineClient],
        num_fetched: int,
        trace: RequestTrace,
    ) -> OpenFetch | None:
        """Send the prompt to a prefill engine, if the target would compute it later. Return the fetch from there.

        `num_fetched`: leading blocks that the target can fetch from engines that have them.
        """
        hints, target = attempts.hints, _target(engine, attempts.num_cached_tokens, ())
        if target is None or not _may_prefill(request):
            return None
        num_blocks = hints.num_reusable - max(target.num_cached, num_fetched)
        if num_blocks * target.block_size <= self._min_remote_prefill_tokens:
            return None
        candidates = {one.address: one for one in peers if self._can_prefill(one, engine, attempts)}
        if not candidates:
            return None
        chosen = self._router.policy.choose(candidates, hints)
        wait = remote_wait(
            self._prefiller(engine),
            self._prefiller(chosen),
            num_tokens=num_blocks * target.block_size,
            num_bytes=num_blocks * target.block_bytes,
            bandwidth=self._rates.get((chosen.address, engine.address)),
        )
        if wait is None:
            return None
        prefill = self._prefills.get((chosen.address, hints.reusable[-1]))
        if prefill is None and (prefill := self._send_prefill(chosen, request, hints, trace)) is None:
            return None
        prefill.num_fetches += 1
        fetch = _open_fetch("prefill", chosen, engine, hints.reusable, target.num_cached)
        fetch.supplier, fetch.wait_ms = prefill, _WAIT_MS + round(1000 * wait)
        return fetch

    def _can_prefill(self, one: EngineClient, engine: EngineClient, attempts: RequestAttempts) -> bool:
        """Return whether the prefill engine can compute the request's prompt for the other engine."""
        if not one.accepts_prefills or one.suspect or not self._rates.get((one.address, engine.address)):
            return False
        num_tokens = attempts.hints.num_prompt_tokens + attempts.num_received
        if one.hello is None or num_tokens >= one.hello.model.max_model_len:
            return False
        if not attempts.takes_embeds(one.hello.model):
            return False
        return attempts.hints.lora is None or one.loras.get(attempts.hints.lora) is not None

    def _send_prefill(
        self, engine: EngineClient, request: EngineCoreRequest, hints: RoutingHints, trace: RequestTrace
    ) -> RemotePrefill | None:
        """Send the prompt to a prefill engine. None if its session has just ended."""
        key = engine.address, hints.reusable[-1]
        num_cached = self._router.policy.record_sent(engine.address, hints)
        span = trace.start_prefill(engine.address)
        num_tokens = max(0, hints.num_prompt_tokens - num_cached)
        prefill = RemotePrefill(num_tokens, span, partial(self._prefill_ended, key))
        sent = replace(
            request,
            request_id=f"{request.request_id}.prefill",
            sampling_params=SamplingParams(),
            prefill_only=True,
            trace_headers=span.headers(),
        )
        sink: OutputSink = prefill
        fetch = self._fetch_prefix(engine, num_cached, hints, self._peers_of(engine))
        if fetch is not None:
            sink = prefill.fetching = self._sink(fetch, len(fetch.blocks), prefill, span)
            sent = replace(sent, kv_source=prefill.fetching.source)
        try:
            prefill.sent = engine.submit(sent, sink)
        except EngineUnavailable as error:
            sink.failed(error, retryable=True)
            return None
        self._prefills[key] = prefill
        return prefill

    def _prefill_ended(self, key: tuple[str, bytes], prefill: RemotePrefill) -> None:
        self._prefills.pop(key, None)
        self._metrics.observe_remote_prefill(prefill.outcome)
        if prefill.error is not None and not isinstance(prefill.error, Overloaded):
            pairs = [each.pair for fetches in self._open.values() for each in fetches if each.supplier is prefill]
            for pair in pairs:
                self._rates.add_failure(pair)

    def _sink(self, fetch: OpenFetch, num_blocks: int, sequence: OutputSink, span: AttemptSpan) -> FetchingSink:
        """`num_blocks`: number of the fetch's blocks that the request needs. 0: all that the source will have."""
        self._metrics.observe_source(fetch.kind)
        if not fetch.num_waiting:
            self._open.setdefault(fetch.pair[1], []).append(fetch)
        return FetchingSink(fetch, fetch.source(num_blocks), self, sequence, span)

    def _end(self, fetch: OpenFetch) -> None:
        if not fetch.is_open:
            return
        fetch.is_open = False
        others = self._open[fetch.pair[1]]
        others.remove(fetch)
        if not others:
            del self._open[fetch.pair[1]]
        if fetch.supplier is not None:
            fetch.supplier.release()

    def _prefiller(self, engine: EngineClient) -> Prefiller:
        """Describe the engine's load with prompts. The engine may not have reported those that were sent last."""
        sent = [one.num_tokens for (address, _), one in self._prefills.items() if address == engine.address]
        stats, info = engine.load_stats, engine.hello.model if engine.hello is not None else None
        return Prefiller(
            num_queued_tokens=max(stats.num_waiting_tokens, sum(sent)),
            step_tokens=info.max_num_batched_tokens if info is not None else 0,
            rate=stats.prefill_tokens_per_second,
            load=engine.load,
        )


def _open_fetch(
    kind: FetchKind, source: EngineClient, engine: EngineClient, blocks: Sequence[bytes], num_cached: int
) -> OpenFetch:
    return OpenFetch(kind, (source.address, engine.address), _mover_addresses(source), blocks, num_cached)


def _follow(leaving: LeavingRequest, engine: EngineClient, attempts: RequestAttempts) -> OpenFetch:
    """Return the fetch of a sequence that moves from an engine that drains."""
    num_cached = attempts.num_cached_tokens // attempts.hints.chain.block_size if attempts.hints.chain else 0
    fetch = _open_fetch("drain", leaving.engine, engine, attempts.hints.reusable, num_cached)
    fetch.supplier = leaving
    return fetch


def _exchange_key(engine: EngineClient) -> tuple[bytes, int] | None:
    """Return what is equal for engines that exchange blocks. None if the engine exchanges none."""
    transfer = engine.hello.model.kv_transfer if engine.hello is not None else None
    return None if transfer is None else (transfer.fingerprint, len(transfer.ports))


def _mover_addresses(engine: EngineClient) -> Sequence[str]:
    transfer = engine.hello.model.kv_transfer if engine.hello is not None else None
    host, _, _ = engine.address.rpartition(":")
    return [] if transfer is None else [f"{host}:{port}" for port in transfer.ports]


def _cost(engine: EngineClient) -> float:
    return _DRAINING_COST if engine.state is EngineState.DRAINING else engine.load


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


def _may_prefill(request: EngineCoreRequest) -> bool:
    """Return whether another engine may compute the request's prompt."""
    return request.pooling_params is None and request.sampling_params.prompt_logprobs is None
