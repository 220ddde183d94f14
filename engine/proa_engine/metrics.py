"""Prometheus metrics of the engine, in a registry handed in.

A step is taken in as a whole: counts are summed first and added once, latencies that many requests share are added
together, so that 256 plain tokens cost microseconds. Families are made when somebody reads them. Knows neither gRPC
nor tensors. Names are vLLM's, with the same latencies under those of the GenAI semantic conventions.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from proa.contract import EngineCoreOutput, Event, EventType, FinishReason, SchedulerStats
from proa_engine.core.types import StepOutputs

PROVIDER_NAME = "proa"
# Seconds; latency buckets start at 1 ms, because a decode step does.
REQUEST_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
FIRST_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
PER_TOKEN_BUCKETS = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
TOKEN_BUCKETS = tuple(2.0**exponent for exponent in range(18))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What `vllm:cache_config_info` tells endpoint pickers."""

    block_size: int
    num_gpu_blocks: int
    enable_prefix_caching: bool


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Answer GET /metrics on a thread of its own; returns what stops it. Raises OSError where the port is taken."""
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class EngineMetrics:
    """The engine's metrics. Steps may be observed on one thread and read on another. Times are in seconds."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str, cache_config: CacheConfig) -> None:
        self._model_name = model_name
        self._cache_config = cache_config
        self._lock = threading.Lock()
        self._lives: dict[str, _Life] = {}
        self._last_token: dict[str, float] = {}  # request_id -> Unix seconds, of unfinished requests
        self._stats = SchedulerStats()
        self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0
        self._finishes: Counter[str] = Counter({reason.name.lower(): 0 for reason in FinishReason})
        self._rejections: Counter[str] = Counter()
        self._first_token = _Histogram(FIRST_TOKEN_BUCKETS)
        self._inter_token = _Histogram(PER_TOKEN_BUCKETS)
        self._per_token = _Histogram(PER_TOKEN_BUCKETS)
        self._e2e = _Histogram(REQUEST_BUCKETS)
        self._queue = _Histogram(REQUEST_BUCKETS)
        self._prefill = _Histogram(REQUEST_BUCKETS)
        self._decode = _Histogram(REQUEST_BUCKETS)
        self._inference = _Histogram(REQUEST_BUCKETS)
        self._request_prompt_tokens = _Histogram(TOKEN_BUCKETS)
        self._request_generation_tokens = _Histogram(TOKEN_BUCKETS)
        self._step = _Histogram(PER_TOKEN_BUCKETS)
        registry.register(self)

    def observe_outputs(self, outputs: StepOutputs) -> None:
        """Take in one step. Its outputs are not changed."""
        now = outputs.timestamp
        plain: list[str] = []  # one token and nothing else to say; handled together, in C
        with self._lock:
            self._stats = outputs.stats
            for output in outputs.outputs:
                if len(output.new_token_ids) == 1 and not output.events and output.finish_reason is None:
                    plain.append(output.request_id)
                else:
                    self._observe_output(output, now)
            self._generation_tokens += len(plain)
            last_token = self._last_token
            for moment, count in Counter(map(last_token.get, plain)).items():
                if moment is not None:
                    self._inter_token.add(now - moment, count)
            last_token.update(dict.fromkeys(plain, now))

    def observe_step(self, duration: float) -> None:
        """Take in how long one step took, from planning it to its outputs."""
        with self._lock:
            self._step.add(duration)

    def observe_stats(self, stats: SchedulerStats) -> None:
        """Take in statistics where there was no step: an idle engine's heartbeat."""
        with self._lock:
            self._stats = stats

    def observe_rejection(self, reason: str) -> None:
        """Count a request that was not taken: `resource_exhausted`, `invalid_argument`, …"""
        with self._lock:
            self._rejections[reason] += 1

    def forget_request(self, request_id: str) -> None:
        """Count a request as aborted that no output will finish. Unknown ids are ignored."""
        with self._lock:
            self._last_token.pop(request_id, None)
            if self._lives.pop(request_id, None):
                self._finishes[FinishReason.ABORT.name.lower()] += 1

    def collect(self) -> Iterator[Metric]:
        """All families; called by the registry."""
        with self._lock:
            families = [*self._gauges(), *self._counters(), *self._histograms()]
        yield from families

    def _observe_output(self, output: EngineCoreOutput, now: float) -> None:
        life = self._lives.get(output.request_id)
        if life is None:
            life = self._lives[output.request_id] = _Life()
        for event in output.events:
            self._observe_event(life, output, event)
        if count := len(output.new_token_ids):
            self._generation_tokens += count
            if last := self._last_token.get(output.request_id):
                self._inter_token.add((now - last) / count, count)
            self._last_token[output.request_id] = now
        if output.finish_reason is not None:
            del self._lives[output.request_id]
            self._last_token.pop(output.request_id, None)
            self._observe_finish(life, output, output.finish_reason, now)

    def _observe_event(self, life: "_Life", output: EngineCoreOutput, event: Event) -> None:
        if event.type is EventType.QUEUED:
            life.queued = event.timestamp
        elif event.type is EventType.SCHEDULED:
            life.scheduled = event.timestamp
            self._queue.add(event.timestamp - (life.queued or event.timestamp))
        elif event.type is EventType.FIRST_TOKEN:
            life.first_token = event.timestamp
            self._first_token.add(event.timestamp - (life.queued or event.timestamp))
            self._prefill.add(event.timestamp - (life.scheduled or event.timestamp))
            self._prompt_tokens += output.num_prompt_tokens or 0
            self._cached_tokens += output.num_cached_tokens or 0

    def _observe_finish(self, life: "_Life", output: EngineCoreOutput, reason: FinishReason, now: float) -> None:
        self._finishes[reason.name.lower()] += 1
        num_output_tokens = output.num_output_tokens or 0
        self._request_prompt_tokens.add(output.num_prompt_tokens or 0)
        self._request_generation_tokens.add(num_output_tokens)
        self._e2e.add(now - (life.queued or now))
        if life.scheduled:
            self._inference.add(now - life.scheduled)
        if life.first_token:
            self._decode.add(now - life.first_token)
            if num_output_tokens > 1:
                self._per_token.add((now - life.first_token) / (num_output_tokens - 1))

    def _gauges(self) -> Iterator[Metric]:
        stats = self._stats
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", stats.num_running_reqs)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", stats.num_waiting_reqs)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV cache in use, 0 to 1.", stats.kv_cache_usage)
        config = self._cache_config
        info = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_gpu_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
        }
        yield self._gauge("vllm:cache_config_info", "The KV cache's configuration.", 1, info)
        lora = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield self._gauge("vllm:lora_requests_info", "LoRA adapters in use.", 1, lora)

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_cache_hits),
            ("num_preemptions", "Requests whose memory was given to another.", stats.num_preemptions),
            ("spec_decode_num_drafts", "Times that a request had drafts in a step.", stats.spec_decode_num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens proposed.", stats.spec_decode_num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Those accepted.", stats.spec_decode_num_accepted_tokens),
            ("prompt_tokens", "Prompt tokens computed or found cached.", self._prompt_tokens),
            ("prompt_tokens_cached", "Those that came from the prefix cache.", self._cached_tokens),
            ("generation_tokens", "Generated tokens.", self._generation_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        yield self._by_reason("vllm:request_success", "Finished requests.", "finished_reason", self._finishes)
        yield self._by_reason("vllm:admission_rejections", "Requests not taken.", "reason", self._rejections)

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From the queue to the first token.", self._first_token),
            ("inter_token_latency_seconds", "Between two tokens of a request.", self._inter_token),
            ("request_time_per_output_token_seconds", "Mean of a request after its first token.", self._per_token),
            ("e2e_request_latency_seconds", "From the queue to the end.", self._e2e),
            ("request_queue_time_seconds", "From the queue to the first step.", self._queue),
            ("request_prefill_time_seconds", "From the first step to the first token.", self._prefill),
            ("request_decode_time_seconds", "From the first token to the end.", self._decode),
            ("request_inference_time_seconds", "From the first step to the end.", self._inference),
            ("request_prompt_tokens", "Prompt tokens of a request.", self._request_prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a request.", self._request_generation_tokens),
        ):
            yield histogram.family(f"vllm:{name}", text, _LABELS, self._labels)
        yield self._step.family("proa_engine_step_duration_seconds", "Duration of a step.", _LABELS, self._labels)
        values = ("text_completion", PROVIDER_NAME, self._model_name)
        for name, text, histogram in (
            ("request_duration_seconds", "From the queue to the end.", self._e2e),
            ("time_to_first_token_seconds", "From the queue to the first token.", self._first_token),
            ("time_per_output_token_seconds", "Mean of a request after its first token.", self._per_token),
        ):
            yield histogram.family(f"gen_ai_server_{name}", text, _GEN_AI, values)

    @property
    def _labels(self) -> tuple[str, str]:
        return (self._model_name, "0")

    def _gauge(self, name: str, text: str, value: float, info: dict[str, str] | None = None) -> Metric:
        extra = info or {}
        family = GaugeMetricFamily(name, text, labels=(*_LABELS, *extra))
        family.add_metric((*self._labels, *extra.values()), value)
        return family

    def _by_reason(self, name: str, text: str, label: str, counts: Counter[str]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*_LABELS, label))
        for reason, count in counts.items():
            family.add_metric((*self._labels, reason), count)
        return family


_LABELS = ("model_name", "engine")
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


@dataclass(slots=True)
class _Life:
    """Moments of an unfinished request, Unix seconds; zero: not yet."""

    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0


class _Histogram:
    """Bucket counts that take the same value many times at once, which prometheus_client's do not."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last is +Inf
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, text: str, labels: Sequence[str], values: Sequence[str]) -> HistogramMetricFamily:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family = HistogramMetricFamily(name, text, labels=labels)
        family.add_metric(values, buckets, self._sum)
        return family
