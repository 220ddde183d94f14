"""What the gateway's page says of engines, sessions, the prefix index and other gateways, read when it is scraped.

To add a metric of the engines, add a line to `ENGINE_GAUGES` or `ENGINE_COUNTERS`.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from proa.contract import SchedulerStats
from proa_gateway.sessions.engine_sessions import EngineSessions
from proa_gateway.sessions.model_sessions import ModelSessions

SESSION_GAUGES: dict[str, tuple[str, Callable[[ModelSessions], float]]] = {
    "proa_gateway_session_capacity": (
        "How many conversations of the mean size of this gateway's the KV caches of the model's engines hold; 0: not "
        "known.",
        lambda sessions: sessions.capacity,
    ),
    "proa_gateway_session_demand": (
        "Blocks of this gateway's conversations with a place, and of those that wait for one, of all blocks of the "
        "model's engines. 1, summed over gateways: they are full.",
        lambda sessions: sessions.demand,
    ),
}
"""Metrics of models whose conversations have places in their engines' caches. Label: `model_name`."""


class Engine(Protocol):
    """What the gauges read of an engine. `model_name` None: there is no session. `refusal`: why it is not used."""

    address: str
    refusal: str
    load_stats: SchedulerStats
    kv_cache_usage: float
    sessions: EngineSessions | None

    @property
    def model_name(self) -> str | None: ...

    @property
    def breaker_state(self) -> int: ...

    @property
    def suspect(self) -> bool: ...


ENGINE_GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "vllm:num_requests_running": ("Requests in the engine's batch.", lambda one: one.load_stats.num_running_reqs),
    "vllm:num_requests_waiting": ("Requests in the engine's queue.", lambda one: one.load_stats.num_waiting_reqs),
    "vllm:kv_cache_usage_perc": ("Used fraction of the engine's KV cache, 0 to 1.", lambda one: one.kv_cache_usage),
    "proa_gateway_session_residents": (
        "Conversations whose blocks the engine retains for this gateway.",
        lambda one: one.sessions.num_residents if one.sessions else 0,
    ),
    "proa_gateway_engine_breaker_state": (
        "Circuit breaker of the engine: 0 closed, 1 half-open, 2 open.",
        lambda one: one.breaker_state,
    ),
    "proa_gateway_engine_suspect": (
        "1 if other engines are preferred, because this one is silent or its step takes long; else 0.",
        lambda one: one.suspect,
    ),
}
ENGINE_COUNTERS: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "vllm:prefix_cache_queries": (
        "Tokens looked up in the engine's prefix cache.",
        lambda one: one.load_stats.prefix_cache_queries,
    ),
    "vllm:prefix_cache_hits": (
        "Tokens found in the engine's prefix cache.",
        lambda one: one.load_stats.prefix_cache_hits,
    ),
    "vllm:num_preemptions": ("Requests that the engine preempted.", lambda one: one.load_stats.num_preemptions),
}
"""Metrics of engines with a session: help text and value by name. Labels: `engine` (host:port), `model_name`. Counters
start with the engine."""


class Index(Protocol):
    """What the gauges read of the prefix index."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class Peers(Protocol):
    @property
    def num_gateways(self) -> int: ...


class PoolMetrics:
    """A collector of the registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._engines: Collection[Engine] = ()
        self._index: Index | None = None  # None until `watch` is called, like `_peers`
        self._peers: Peers | None = None
        registry.register(self)

    def watch(self, engines: Collection[Engine], index: Index, peers: Peers) -> None:
        """Set what the gauges of engines, of the prefix index and of other gateways read. `engines` is a live view of
        the engine pool."""
        self._engines, self._index, self._peers = engines, index, peers

    def collect(self) -> Iterator[Metric]:
        """Called by the registry for each scrape."""
        engines = [engine for engine in self._engines if engine.model_name is not None]
        for metrics, make in ((ENGINE_GAUGES, GaugeMetricFamily), (ENGINE_COUNTERS, CounterMetricFamily)):
            for name, (text, value) in metrics.items():
                family = make(name, text, labels=("engine", "model_name"))
                for engine in engines:
                    family.add_metric((engine.address, engine.model_name or ""), value(engine))
                yield family
        models = {one.sessions.model: one.model_name or "" for one in engines if one.sessions is not None}
        for name, (text, of_model) in SESSION_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=("model_name",))
            for sessions, model in models.items():
                family.add_metric((model,), of_model(sessions))
            yield family
        yield GaugeMetricFamily("proa_gateway_sessions", "Open gRPC sessions with engines.", len(engines))
        refused = GaugeMetricFamily(
            "proa_gateway_engine_refused",
            "1 for each engine that answers but is not used by the gateway; the gateway's log has the reason.",
            labels=("engine",),
        )
        for engine in self._engines:
            if engine.refusal:
                refused.add_metric((engine.address,), 1)
        yield refused
        if (peers := self._peers) is not None:
            yield GaugeMetricFamily(
                "proa_gateway_scaler_peers",
                "Other gateways whose waiting requests the external scaler counts.",
                peers.num_gateways,
            )
        if (index := self._index) is not None:
            yield GaugeMetricFamily(
                "proa_gateway_routing_index_blocks", "Cached blocks in the prefix index, all engines.", index.num_blocks
            )
            yield GaugeMetricFamily(
                "proa_gateway_routing_index_bytes", "Estimated memory of the prefix index, in bytes.", index.num_bytes
            )
