"""Prometheus metrics of the gateway, in a registry handed in.

Nothing is done a token: a request is observed when it ends, an engine's statistics are kept as they came and turned
into gauges when somebody reads them. Knows neither HTTP nor gRPC. Names are those of the GenAI semantic conventions
in Prometheus spelling, and vLLM's for what autoscalers and endpoint pickers read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from proa_gateway.routing.index import PrefixIndex

PROVIDER_NAME = "proa"
# Seconds; latency buckets start at 1 ms, because a decode step does.
REQUEST_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
QUEUE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
FIRST_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
PER_TOKEN_BUCKETS = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """An engine's statistics as last reported."""

    model_name: str
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float  # 0 to 1
    breaker_state: int  # 0: closed, 1: half-open, 2: open


class GatewayMetrics:
    """The gateway's metrics. Times are in seconds. `/metrics` answers with `render()`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._engines: dict[str, EngineLoad] = {}

        def histogram(name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "From the request's arrival to its last byte.",
            (*_GEN_AI, "error_type"),
            REQUEST_BUCKETS,
        )
        self._first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From the request's arrival to its first token, of successful requests.",
            _GEN_AI,
            FIRST_TOKEN_BUCKETS,
        )
        self._per_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time a token after the first one, of successful requests.",
            _GEN_AI,
            PER_TOKEN_BUCKETS,
        )
        self._requests = counter(
            "proa_gateway_requests",
            "Requests answered. A stream that broke off has status 200 and an error type.",
            *("route", "status", "error_type"),
        )
        self._finished = counter(
            "proa_gateway_finished_sequences",
            "Output sequences that ended, by the reason that the client was told.",
            *("gen_ai_request_model", "reason"),
        )
        self._tokens = counter("proa_gateway_tokens", "Tokens of ended requests.", "gen_ai_request_model", "type")
        self._aborts = counter("proa_gateway_aborted_requests", "Requests given up by their client.")
        self._rejections = counter("proa_gateway_admission_rejections", "Requests not admitted.", "reason")
        self._retries = counter("proa_gateway_retried_requests", "Sequences sent again before their first token.")
        self._failovers = counter(
            "proa_gateway_failovers", "Sequences that lost their engine after their first token.", "outcome"
        )
        self.requests_in_flight = Gauge(
            "proa_gateway_requests_in_flight", "Requests being answered.", registry=registry
        )
        self.sessions = Gauge("proa_gateway_sessions", "Open sessions with engines.", registry=registry)
        self._cache_hits = counter(
            "proa_gateway_routed_cache_hit_tokens",
            "Prompt tokens that an engine had cached: as expected when it was chosen, and as it said itself.",
            "by",
        )
        self.queue_depth = Gauge(
            "proa_gateway_queue_depth",
            "Requests waiting in the gateway until the model's engines have capacity, or until its first engine is up.",
            ("model",),
            registry=registry,
        )
        self._queue_wait = histogram(
            "proa_gateway_queue_wait_seconds",
            "Time in the gateway's queue, of requests that had to wait.",
            ("model", "outcome"),
            QUEUE_BUCKETS,
        )
        self._key_requests = counter("proa_gateway_key_requests", "Generation requests of an API key.", "key", "status")
        self._key_tokens = counter("proa_gateway_key_tokens", "Tokens of an API key's ended requests.", "key", "type")
        registry.register(self)

    def observe_request(self, route: str, status: int, error_type: str = "") -> None:
        """Count one answered HTTP request. `route` is the path's template. `error_type` set: it failed, be it after
        its status was sent."""
        self._requests.labels(route, str(status), error_type).inc()

    def observe_finish(self, model: str, reason: str) -> None:
        """Count one output sequence: `stop`, `length` or `abort` as the client was told, `error` where it was told of
        one instead, `client_disconnected` where nobody was there to be told."""
        self._finished.labels(model, reason).inc()

    def observe_generation(
        self,
        *,
        operation: str,
        model: str,
        duration: float,
        time_to_first_token: float | None = None,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
        error_type: str = "",
    ) -> None:
        """Observe one generation when it ends. `operation` is `chat` or `text_completion`; the duration is that of
        the whole request. `error_type` set: it failed, and only duration and tokens count."""
        labels = (operation, PROVIDER_NAME, model)
        self._duration.labels(*labels, error_type).observe(duration)
        for kind, count in (("input", input_tokens), ("output", output_tokens), ("cached", cached_tokens)):
            self._tokens.labels(model, kind).inc(count)
        if error_type or time_to_first_token is None:
            return
        self._first_token.labels(*labels).observe(time_to_first_token)
        if output_tokens > 1:
            self._per_token.labels(*labels).observe((duration - time_to_first_token) / (output_tokens - 1))

    def observe_abort(self) -> None:
        self._aborts.inc()

    def observe_rejection(self, reason: str) -> None:
        """Count a request that was turned away: over the gateway's `requests`, `tokens` or `waiting`, over its key's
        `rate_limit`, without an `api_key`; after `queue_timeout`, while `draining`, with `no_engine`."""
        self._rejections.labels(reason).inc()

    def observe_queue_wait(self, model: str, outcome: str, seconds: float) -> None:
        """Observe a wait in the queue. `outcome`: `admitted`, `given_up` (client gone) or the code of the error."""
        self._queue_wait.labels(model, outcome).observe(seconds)

    def observe_key(self, key: str, status: int, *, input_tokens: int, output_tokens: int) -> None:
        """Count one request of an API key, and its tokens."""
        self._key_requests.labels(key, str(status)).inc()
        self._key_tokens.labels(key, "input").inc(input_tokens)
        self._key_tokens.labels(key, "output").inc(output_tokens)

    def observe_retry(self) -> None:
        self._retries.inc()

    def observe_failover(self, outcome: Literal["resumed", "given_up"]) -> None:
        """Another engine goes on with a sequence, or none does."""
        self._failovers.labels(outcome).inc()

    def observe_cache_hit(self, *, expected: int, reported: int) -> None:
        """Prompt tokens of one sequence that were not computed."""
        self._cache_hits.labels("gateway").inc(expected)
        self._cache_hits.labels("engine").inc(reported)

    def watch_index(self, index: PrefixIndex) -> None:
        """Show how large the index of cached blocks is."""
        for name, text, value in (
            ("blocks", "Cached blocks of all engines that routing knows.", lambda: index.num_blocks),
            ("bytes", "Memory that they take.", lambda: index.num_bytes),
        ):
            Gauge(f"proa_gateway_routing_index_{name}", text, registry=self._registry).set_function(value)

    def observe_engine(self, engine: str, load: EngineLoad) -> None:
        """Keep an engine's latest statistics under its name, as `host:port`."""
        self._engines[engine] = load

    def forget_engine(self, engine: str) -> None:
        """Drop the gauges of an engine that went away. Unknown names are ignored."""
        self._engines.pop(engine, None)

    def render(self) -> bytes:
        """All metrics of the registry in Prometheus' text format, `text/plain; version=0.0.4`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engines' gauges; called by the registry."""
        labels = ("engine", "model_name")
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in the engine's batch.", labels=labels)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Requests waiting in the engine.", labels=labels)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV cache in use, 0 to 1.", labels=labels)
        breaker = GaugeMetricFamily(
            "proa_gateway_engine_breaker_state", "Circuit breaker: 0 closed, 1 half-open, 2 open.", labels=labels
        )
        for engine, load in list(self._engines.items()):
            values = (engine, load.model_name)
            running.add_metric(values, load.num_requests_running)
            waiting.add_metric(values, load.num_requests_waiting)
            usage.add_metric(values, load.kv_cache_usage)
            breaker.add_metric(values, load.breaker_state)
        yield from (running, waiting, usage, breaker)
