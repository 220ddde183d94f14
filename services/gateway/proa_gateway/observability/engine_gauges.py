"""Metrics of the gateway's engines, read when they are scraped. A new one is a line in one of the two tables."""

from collections.abc import Callable
from typing import Protocol

from proa.contract import SchedulerStats


class Engine(Protocol):
    """What the gauges read of an engine. `model_name` None: there is no session."""

    address: str
    load_stats: SchedulerStats
    kv_cache_usage: float

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
