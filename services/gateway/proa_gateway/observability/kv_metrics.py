"""Metrics of KV cache blocks that engines fetch from each other, and of prompts that prefill engines compute."""

from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

FETCH_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40)
FetchKind = Literal["hot_prefix", "prefill", "drain"]
"""Why an engine fetches blocks from another: it has them, computes them for this request, or drains."""


class KvMetrics:
    """Times are in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        self._kv_sources = counter(
            "proa_gateway_kv_sources",
            "Requests sent with another engine as the source of KV cache blocks, by kind: hot_prefix, prefill, drain.",
            ("kind",),
        )
        self._fetched_tokens = counter(
            "proa_gateway_kv_fetched_tokens", "Tokens whose blocks engines fetched from other engines.", ("kind",)
        )
        self._fetched_bytes = counter(
            "proa_gateway_kv_fetched_bytes", "Bytes that engines fetched from other engines.", ("kind",)
        )
        self._fetch_time = Histogram(
            "proa_gateway_kv_fetch_seconds",
            "Time that requests waited for blocks from another engine, before they were queued.",
            ("kind",),
            registry=registry,
            buckets=FETCH_BUCKETS,
        )
        self._remote_prefills = counter(
            "proa_gateway_remote_prefills",
            "Prompts sent to prefill engines, by outcome: used (blocks were fetched), unused (none came in time), "
            "rejected, lost (with the engine), aborted (with their request).",
            ("outcome",),
        )

    def observe_source(self, kind: FetchKind) -> None:
        """Count a request that is sent with a KV source."""
        self._kv_sources.labels(kind).inc()

    def observe_fetch(self, kind: FetchKind, *, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """Observe a fetch that has ended. Requests that waited for the same one count once."""
        self._fetched_tokens.labels(kind).inc(num_tokens)
        self._fetched_bytes.labels(kind).inc(num_bytes)
        self._fetch_time.labels(kind).observe(seconds)

    def observe_remote_prefill(self, outcome: str) -> None:
        """Count a prompt that was sent to a prefill engine, when it has failed or is no longer needed."""
        self._remote_prefills.labels(outcome).inc()
