"""GrammarStats: counts and times of compiling grammars and filling masks, as Prometheus metric families."""

import threading
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from proa.metric_buckets import REQUEST_BUCKETS
from proa_engine.metric_families import CounterByLabel, Histogram, counter

_FILL_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
REASONS = ("invalid", "too_complex", "unsatisfiable", "resumed", "queue_full", "queue_timeout", "memory_full")


class GrammarStats:
    """Thread-safe. Times are in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_queries = self._num_hits = 0
        self._refusals = CounterByLabel("reason", REASONS)
        self._compile = Histogram(
            "proa_engine_grammar_compile_duration_seconds", "Seconds to compile and try a grammar.", REQUEST_BUCKETS
        )
        self._fill = Histogram(
            "proa_engine_grammar_fill_duration_seconds", "Seconds to compute the masks of a step.", _FILL_BUCKETS
        )

    def observe_query(self, *, hit: bool) -> None:
        """Count a request whose grammar was looked up among the compiled ones."""
        with self._lock:
            self._num_queries += 1
            self._num_hits += hit

    def observe_compile(self, seconds: float) -> None:
        with self._lock:
            self._compile.observe(seconds)

    def observe_fill(self, seconds: float) -> None:
        with self._lock:
            self._fill.observe(seconds)

    def observe_refusal(self, reason: str) -> None:
        """Count a refused request; `reason` is one of `REASONS`."""
        with self._lock:
            self._refusals.counts[reason] += 1

    def families(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        with self._lock:
            yield self._compile.family(labels)
            yield self._fill.family(labels)
            for name, text, value in (
                ("queries", "Requests with a grammar.", self._num_queries),
                ("hits", "Requests whose grammar was compiled already.", self._num_hits),
            ):
                yield counter(f"proa_engine_grammar_cache_{name}", text, labels, value)
            text = "Requests refused for their grammar, by reason."
            yield counter("proa_engine_grammar_refusals", text, labels, self._refusals)
