"""The gateway's Prometheus metrics.

To add one, declare it in the `__init__` of its class, here or in a file beside this one, and set it in the `observe_`
method of the event; those of a request that has ended are set from its `Outcome`. Names follow the GenAI semantic
conventions, and vLLM's. Nothing is updated per token; what engines say is read when scraped.
"""

from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from proa.metric_buckets import COUNT_BUCKETS, FIRST_TOKEN_BUCKETS, PER_TOKEN_BUCKETS, REQUEST_BUCKETS
from proa.telemetry import PROVIDER_NAME
from proa_gateway.observability.kv_metrics import KvMetrics
from proa_gateway.observability.media_metrics import MediaMetrics
from proa_gateway.observability.outcome import Outcome
from proa_gateway.observability.pool_metrics import PoolMetrics

QUEUE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
_FINISHES = {"client_disconnected": "abort"}  # reasons that vLLM calls otherwise


class VllmMetrics:
    """vLLM's metrics of requests, times in seconds. They have no label `engine`, unlike the engines' own: after a
    failover a request was served by several engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, ("model_name",), registry=registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ("model_name", *labels), registry=registry)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generation_tokens = counter("generation_tokens", "Output tokens of ended requests.")
        self._success = counter("request_success", "Ended output sequences, by reason.", "finished_reason")
        text = "Time from a request's arrival at the gateway to its first token."
        self._first_token = histogram("time_to_first_token_seconds", text, FIRST_TOKEN_BUCKETS)
        text = "Mean time per token of a request, without its first token."
        self._per_token = histogram("request_time_per_output_token_seconds", text, PER_TOKEN_BUCKETS)
        text = "Time from a request's arrival at the gateway to its end."
        self._latency = histogram("e2e_request_latency_seconds", text, REQUEST_BUCKETS)
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS)
        self._request_output = histogram("request_generation_tokens", "Output tokens of a request.", COUNT_BUCKETS)
        text = "Output tokens of the longest sequence of a request."
        self._longest_output = histogram("request_max_num_generation_tokens", text, COUNT_BUCKETS)
        self._choices = histogram("request_params_n", "The parameter n.", CHOICE_BUCKETS)
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", COUNT_BUCKETS)

    def observe_outcome(self, outcome: Outcome, time_per_output_token: float | None) -> None:
        """Observe a request when it ends. `time_per_output_token`: after the first one; None: there is no other one. Of
        a request that failed only tokens and finishes are observed."""
        model = outcome.base_model  # as in vLLM, also for an adapter
        if model:
            self._prompt_tokens.labels(model).inc(outcome.input_tokens)
            self._generation_tokens.labels(model).inc(outcome.output_tokens)
        for reason, count in outcome.finishes.items():
            self._success.labels(model, _FINISHES.get(reason, reason)).inc(count)
        if outcome.error_type or outcome.time_to_first_token is None:
            return
        self._first_token.labels(model).observe(outcome.time_to_first_token)
        self._latency.labels(model).observe(outcome.duration)
        if time_per_output_token is not None:
            self._per_token.labels(model).observe(time_per_output_token)
        self._request_prompt.labels(model).observe(outcome.input_tokens)
        self._request_output.labels(model).observe(outcome.output_tokens)
        self._longest_output.labels(model).observe(outcome.longest_output)
        self._choices.labels(model).observe(outcome.num_choices)
        if outcome.max_tokens is not None:
            self._max_tokens.labels(model).observe(outcome.max_tokens)


class GatewayMetrics:
    """Times are in seconds. All methods must be called in the event loop's thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.pool = PoolMetrics(registry)
        self.kv = KvMetrics(registry)
        self.media = MediaMetrics(registry)
        self._vllm = VllmMetrics(registry)

        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from a generation request's arrival to its last byte.",
            (*_GEN_AI, "error_type"),
            buckets=REQUEST_BUCKETS,
        )
        self._first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from a request's arrival to its first token, for successful requests.",
            _GEN_AI,
            buckets=FIRST_TOKEN_BUCKETS,
        )
        self._per_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per output token after the first one, for successful requests.",
            _GEN_AI,
            buckets=PER_TOKEN_BUCKETS,
        )
        self._requests = counter(
            "proa_gateway_requests",
            "HTTP requests answered. A stream that failed after its start has status 200 and an error type.",
            ("route", "status", "error_type"),
        )
        self._finished = counter(
            "proa_gateway_finished_sequences",
            "Output sequences ended, by reason: stop, length, abort, error, client_disconnected.",
            ("gen_ai_request_model", "reason"),
        )
        self._tokens = counter(
            "proa_gateway_tokens",
            "Tokens of ended requests, by type: input, output, cached (input tokens found in a prefix cache).",
            ("gen_ai_request_model", "type"),
        )
        self._aborts = counter("proa_gateway_aborted_requests", "Requests aborted because their client disconnected.")
        self._rejections = counter(
            "proa_gateway_admission_rejections", "Requests rejected by the gateway.", ("reason",)
        )
        self._retries = counter("proa_gateway_retried_requests", "Sequences sent again before their first token.")
        self._failovers = counter(
            "proa_gateway_failovers",
            "Sequences that lost their engine after their first token, by outcome: resumed, given_up.",
            ("outcome",),
        )
        for outcome in ("resumed", "given_up"):
            self._failovers.labels(outcome)  # starts at 0, so that Prometheus' increase() counts the first one
        self._moves = counter(
            "proa_gateway_moved_sequences",
            "Sequences moved to another engine, which fetched their KV cache blocks, by reason: drain.",
            ("reason",),
        )
        self.requests_in_flight = Gauge(
            "proa_gateway_requests_in_flight", "Generation requests not answered completely yet.", registry=registry
        )
        self._cache_hits = counter(
            "proa_gateway_routed_cache_hit_tokens",
            "Prompt tokens in the engine's prefix cache: expected by the gateway, or reported by the engine.",
            ("by",),
        )
        self.queue_depth = Gauge(
            "proa_gateway_queue_depth",
            "Requests waiting in the gateway until the model's engines have capacity, or until its first engine is up.",
            ("model",),
            registry=registry,
        )
        self._session_wait = histogram(
            "proa_gateway_session_wait_seconds",
            "Time that a turn of a conversation waited for a place in the KV cache, by how that ended.",
            ("model", "outcome"),
            buckets=QUEUE_BUCKETS,
        )
        self._queue_wait = histogram(
            "proa_gateway_queue_wait_seconds",
            "Time in the gateway's queue, for requests that had to wait.",
            ("model", "outcome"),
            buckets=QUEUE_BUCKETS,
        )
        self._key_requests = counter("proa_gateway_key_requests", "Generation requests per API key.", ("key", "status"))
        self._key_tokens = counter("proa_gateway_key_tokens", "Tokens of an API key's ended requests.", ("key", "type"))

    def observe_request(self, route: str, status: int, error_type: str = "") -> None:
        """Count one HTTP request. `route` is the path template, `error_type` is set if it failed."""
        self._requests.labels(route, str(status), error_type).inc()

    def observe_outcome(self, outcome: Outcome) -> None:
        """Observe a request when it ends. If it failed only its duration, tokens and finishes are observed; whoever
        answers it with an error calls `observe_request` too."""
        model, error_type, first = outcome.model, outcome.error_type, outcome.time_to_first_token
        if outcome.status == 200:
            self._requests.labels(outcome.route, "200", error_type).inc()
        labels = (outcome.operation, PROVIDER_NAME, model)
        self._duration.labels(*labels, error_type).observe(outcome.duration)
        self._tokens.labels(model, "input").inc(outcome.input_tokens)
        self._tokens.labels(model, "output").inc(outcome.output_tokens)
        self._tokens.labels(model, "cached").inc(outcome.cached_tokens)
        for reason, count in outcome.finishes.items():
            self._finished.labels(model, reason).inc(count)
        if outcome.key:
            self._key_requests.labels(outcome.key, str(outcome.status)).inc()
            self._key_tokens.labels(outcome.key, "input").inc(outcome.input_tokens if outcome.was_sent else 0)
            self._key_tokens.labels(outcome.key, "output").inc(outcome.output_tokens)
        per_token = None
        if not error_type and first is not None:
            self._first_token.labels(*labels).observe(first)
            if outcome.output_tokens > 1:
                per_token = (outcome.duration - first) / (outcome.output_tokens - 1)
                self._per_token.labels(*labels).observe(per_token)
        self._vllm.observe_outcome(outcome, per_token)

    def observe_abort(self) -> None:
        self._aborts.inc()

    def observe_rejection(self, reason: str) -> None:
        """Count a rejected request.

        `reason`: the gateway limit that was exceeded (`requests`, `tokens`, `waiting`, `images`, `audios`),
        `rate_limit` of the API key, `api_key` missing or unknown, `host` not allowed, `queue_timeout`, `draining` or
        `no_engine`.
        """
        self._rejections.labels(reason).inc()

    def observe_queue_wait(self, model: str, outcome: str, seconds: float) -> None:
        """Observe a wait in the queue. `outcome`: `admitted`, `given_up` (client gone) or the code of the error."""
        self._queue_wait.labels(model, outcome).observe(seconds)

    def observe_session_wait(self, model: str, outcome: str, seconds: float) -> None:
        """Observe a turn's wait for a place in the cache. `outcome`: `place`, `visitor` (it went on without one) or
        `given_up`."""
        self._session_wait.labels(model, outcome).observe(seconds)

    def observe_retry(self) -> None:
        self._retries.inc()

    def observe_failover(self, outcome: Literal["resumed", "given_up"]) -> None:
        """Count a sequence that another engine continues, or none does."""
        self._failovers.labels(outcome).inc()

    def observe_move(self, reason: Literal["drain"]) -> None:
        """Count a sequence that another engine continues although its own could have gone on."""
        self._moves.labels(reason).inc()

    def observe_cache_hit(self, *, expected: int, reported: int) -> None:
        """Count one sequence's cached prompt tokens, as the gateway expected and as the engine reported."""
        self._cache_hits.labels("gateway").inc(expected)
        self._cache_hits.labels("engine").inc(reported)

    def render(self) -> bytes:
        """Return all metrics of the registry in the Prometheus text format, `text/plain; version=0.0.4`."""
        return generate_latest(self._registry)
