"""Prometheus metrics of who waits for their turn, and of what each API key uses. Knows neither HTTP nor engines.

Labels are names of models that the gateway knows and names from the file of keys, so there are few of them.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class AdmissionMetrics:
    """`queue_depth` is what an autoscaler reads: requests held while no engine is up count too."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queue_depth = Gauge(
            "proa_gateway_queue_depth",
            "Requests that wait in the gateway for an engine to have room, or to come up.",
            ("model",),
            registry=registry,
        )
        self._wait = Histogram(
            "proa_gateway_queue_wait_seconds",
            "Time in the gateway's queue, of requests that had to wait.",
            ("model", "outcome"),
            registry=registry,
            buckets=WAIT_BUCKETS,
        )
        self._key_requests = Counter(
            "proa_gateway_key_requests", "Generation requests of an API key.", ("key", "status"), registry=registry
        )
        self._key_tokens = Counter(
            "proa_gateway_key_tokens", "Tokens of an API key's ended requests.", ("key", "type"), registry=registry
        )

    def observe_wait(self, model: str, outcome: str, seconds: float) -> None:
        """`outcome`: `admitted`, or what ended the wait otherwise."""
        self._wait.labels(model, outcome).observe(seconds)

    def observe_key(self, key: str, status: int, *, input_tokens: int, output_tokens: int) -> None:
        self._key_requests.labels(key, str(status)).inc()
        self._key_tokens.labels(key, "input").inc(input_tokens)
        self._key_tokens.labels(key, "output").inc(output_tokens)
