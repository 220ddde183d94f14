"""The engine's Prometheus metrics. Names are vLLM's; three latencies also have their GenAI semantic convention names.

A new metric: declare it in `__init__` (a histogram), `_gauges` or `_counters`, and set it in an `observe_` method.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from proa.contract import EngineCoreOutput, EngineCoreRequest, Event, EventType, FinishReason, SchedulerStats
from proa.metric_buckets import COUNT_BUCKETS, FIRST_TOKEN_BUCKETS, PER_TOKEN_BUCKETS, REQUEST_BUCKETS
from proa.telemetry import PROVIDER_NAME
from proa_engine.config import EngineConfig
from proa_engine.core.counters import CoreCounters
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.types import CacheOccupancy, DiskOccupancy, FetchCounts, HostOccupancy, StepOutputs
from proa_engine.grammar.stats import GrammarStats
from proa_engine.metric_families import CounterByLabel, Histogram, counter, gauge, gauge_by_label
from proa_engine.observability.draft_metrics import accepted_drafts, draft_families
from proa_engine.observability.stats_log import Totals

PREEMPTION_BUCKETS = (0, 1, 2, 5, 10, 20)


@dataclass(slots=True)
class _RequestTimes:
    """When an unfinished request reached its stages, in Unix seconds, zero if it has not; and its number of
    preemptions."""

    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    num_preemptions: int = 0


class EngineMetrics:
    """Computes metrics from the outputs of steps. One thread may observe while another scrapes. Times are in
    seconds."""

    def __init__(
        self,
        registry: CollectorRegistry,
        config: EngineConfig,
        *,
        cache_groups: CacheGroups,
        max_model_len: int,
        stats: Callable[[], SchedulerStats] = SchedulerStats,
        counters: Callable[[], CoreCounters] = CoreCounters,
        grammars: GrammarStats | None = None,
    ) -> None:
        """`stats` and `counters` are called at each scrape. `grammars` None: the engine has no grammar
        compiler."""
        self._config = config
        self._num_gpu_blocks = cache_groups.num_blocks
        self._max_concurrency = cache_groups.concurrency(max_model_len)
        self._cache_tokens = int(self._max_concurrency * max_model_len)
        self._stats = stats
        self._core_counters = counters
        self._grammars = grammars
        self._labels = {"model_name": config.model_name, "engine": "0"}
        self._lock = threading.Lock()
        self._requests: dict[str, _RequestTimes] = {}  # request_id -> times of an unfinished request
        self._loras: dict[str, str] = {}  # request_id -> adapter of an unfinished request that has one
        self._num_resumed: dict[str, int] = {}  # request_id -> tokens that another engine generated, if there are any
        # Unix seconds of an unfinished request's last token: of those in `_plain_ids` together, of the others by id.
        self._plain_ids: Sequence[str] = ()
        self._plain_time = 0.0
        self._last_token: dict[str, float] = {}
        self._prompt_tokens = self._cached_tokens = self._loaded_tokens = self._generation_tokens = 0
        self._finishes = CounterByLabel("finished_reason", (reason.public_name for reason in FinishReason))
        self._rejections = CounterByLabel("reason")
        self._histograms: list[Histogram] = []
        add = self._add_histogram
        text = "Seconds until the first token."
        self._first_token = add("vllm:time_to_first_token_seconds", text, FIRST_TOKEN_BUCKETS)
        self._inter_token = add(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of a request.", PER_TOKEN_BUCKETS
        )
        self._per_token = add(
            "vllm:request_time_per_output_token_seconds",
            "Mean seconds per token of a finished request, without its first token.",
            PER_TOKEN_BUCKETS,
        )
        self._e2e = add("vllm:e2e_request_latency_seconds", "Seconds from queueing to the end.")
        self._queue = add("vllm:request_queue_time_seconds", "Seconds from queueing to the first step.")
        self._prefill = add("vllm:request_prefill_time_seconds", "Seconds from the first step to the first token.")
        self._decode = add("vllm:request_decode_time_seconds", "Seconds from first token to the end.")
        self._inference = add("vllm:request_inference_time_seconds", "Seconds from first step to the end.")
        self._request_prompt_tokens = add("vllm:request_prompt_tokens", "Prompt tokens per request.", COUNT_BUCKETS)
        self._request_output_tokens = add("vllm:request_generation_tokens", "Output tokens per request.", COUNT_BUCKETS)
        text = "Tokens of a step: generated ones, and the prompts of the requests that got their first."
        self._step_tokens = add("vllm:iteration_tokens_total", text, COUNT_BUCKETS)
        text = "Prompt tokens of a request that were not in the prefix cache."
        self._computed_tokens = add("vllm:request_prefill_kv_computed_tokens", text, COUNT_BUCKETS)
        text = "Times that a finished request was preempted."
        self._preemptions = add("vllm:request_num_preemptions", text, PREEMPTION_BUCKETS)
        self._step = add(
            "proa_engine_step_duration_seconds", "Seconds from scheduling a step to its outputs.", PER_TOKEN_BUCKETS
        )
        registry.register(self)

    def observe_request(self, request: EngineCoreRequest) -> None:
        """Store the adapter of a request and what it resumes. Call it before the core has the request."""
        with self._lock:
            if request.lora_name:
                self._loras[request.request_id] = request.lora_name
            if request.resumed_token_ids:
                self._num_resumed[request.request_id] = len(request.resumed_token_ids)

    def observe_outputs(self, outputs: StepOutputs) -> None:
        """Count one step's outputs. They are not modified."""
        with self._lock:
            before = self._prompt_tokens + self._generation_tokens
            self._observe_plain(outputs.plain.request_ids, outputs.timestamp)
            for output in outputs.outputs:
                self._observe_output(output, outputs.timestamp)
            if num_tokens := self._prompt_tokens + self._generation_tokens - before:
                self._step_tokens.observe(num_tokens)

    def observe_step(self, duration: float) -> None:
        """Count a step that took `duration` seconds from scheduling to its outputs."""
        with self._lock:
            self._step.observe(duration)

    def observe_rejection(self, reason: str, request_id: str = "") -> None:
        """Count a rejected request. `reason` is a gRPC status code in lower case; `request_id` is set if the request
        was observed."""
        with self._lock:
            self._loras.pop(request_id, None)
            self._num_resumed.pop(request_id, None)
            self._rejections.counts[reason] += 1

    def totals(self) -> Totals:
        """Return the tokens so far, beside the engine's load now."""
        drafts = self._core_counters().drafts
        with self._lock:
            return Totals(self._prompt_tokens - self._cached_tokens, self._generation_tokens, self._stats(), drafts)

    def collect(self) -> Iterator[Metric]:
        """Return all metric families. The registry calls this at each scrape."""
        stats, counters = self._stats(), self._core_counters()
        with self._lock:
            families = [
                *self._gauges(stats, counters),
                *self._counters(stats, counters),
                *draft_families(self._config.speculative_config, counters.drafts, self._labels),
                *self._render_histograms(),
            ]
        yield from families
        if self._grammars is not None:
            yield from self._grammars.families(self._labels)

    def _gauges(self, stats: SchedulerStats, counters: CoreCounters) -> Iterator[Metric]:
        labels = self._labels
        yield gauge("vllm:num_requests_running", "Requests running now.", labels, stats.num_running_reqs)
        yield gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", labels, stats.num_waiting_reqs)
        yield self._waiting_by_reason(stats.num_waiting_reqs, counters.num_deferred_reqs)
        yield self._sleep_state(stats)
        yield gauge("vllm:kv_cache_usage_perc", "KV cache blocks in use, 0 to 1.", labels, stats.kv_cache_usage)
        text = "Blocks that sessions retain for their next turns, in use or free."
        yield gauge("proa_engine_retained_blocks", text, labels, stats.num_retained_blocks)
        yield from self._cache_gauges(counters.cache)
        cache = {
            "block_size": str(self._config.block_size),
            "num_gpu_blocks": str(self._num_gpu_blocks),
            "kv_cache_size_tokens": str(self._cache_tokens),
            "kv_cache_max_concurrency": f"{self._max_concurrency:.2f}",
            "enable_prefix_caching": str(self._config.enable_prefix_caching),
        }
        yield gauge("vllm:cache_config_info", "Configuration of the KV cache, as labels.", labels | cache, 1)
        text = "What gateways send to the engine, as label role: both, prefill or decode."
        yield gauge("proa_engine_info", text, labels | {"role": self._config.kv_tiers.role}, 1)
        text = "Adapters of running and of waiting requests, as labels; the value is the time, in Unix seconds."
        yield gauge("vllm:lora_requests_info", text, labels | self._lora_labels(), time.time())

    def _lora_labels(self) -> dict[str, str]:
        running, waiting = set[str](), set[str]()
        for request_id, name in self._loras.items():
            times = self._requests.get(request_id)
            (running if times is not None and times.scheduled else waiting).add(name)
        return {
            "max_lora": str(self._config.lora.max_loras if self._config.lora.enable_lora else 0),
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(waiting)),
        }

    def _cache_gauges(self, cache: CacheOccupancy) -> Iterator[Metric]:
        blocks = {str(table): count for table, count in enumerate(cache.cached_blocks)}
        text = "Blocks in the prefix cache, by table: 0 for full attention, the others for sliding windows."
        yield gauge_by_label("proa_engine_prefix_cache_blocks", text, self._labels, "table", blocks)
        text = "Positions at which a request can continue a cached prefix, for models with windows or states."
        yield gauge("proa_engine_prefix_cache_checkpoints", text, self._labels, cache.num_checkpoints)
        states = {
            "used": cache.num_used_states,
            "cached": cache.num_cached_states,
            "free": cache.num_free_states,
        }
        text = "Slots for the recurrent states of one request, by use."
        yield gauge_by_label("proa_engine_state_slots", text, self._labels, "use", states)
        if cache.host is not None:
            yield from self._host_metrics(cache.host, cache.disk)
        if cache.fetches is not None:
            yield from self._fetch_metrics(cache.fetches)
        if cache.disk is not None:
            yield from self._disk_metrics(cache.disk)

    def _host_metrics(self, host: HostOccupancy, disk: DiskOccupancy | None) -> Iterator[Metric]:
        labels, text = self._labels, "Pages of host memory that hold blocks of the prefix cache, 0 to 1."
        usage = host.num_cached_pages / host.num_pages
        yield gauge("vllm:kv_offload_cpu_cache_usage_perc", text, labels, usage)
        moved = CounterByLabel("transfer_type")
        moved.counts["GPU_to_CPU"] = host.num_stored_pages * host.page_bytes
        moved.counts["CPU_to_GPU"] = host.num_loaded_pages * host.page_bytes
        if disk is not None:
            num_ranks = self._config.parallel.tensor_parallel_size
            moved.counts["CPU_to_disk"] = disk.counts.num_written_bytes // num_ranks
            moved.counts["disk_to_CPU"] = disk.counts.num_read_bytes // num_ranks
        text = "Bytes copied on one rank between device, host memory and disk, without states between the first two."
        yield counter("vllm:kv_offload_total_bytes", text, labels, moved)
        text = "Blocks that were not stored in host memory, because too many waited or no page was free."
        yield counter("vllm:kv_offload_stores_skipped", text, labels, host.num_skipped_stores)
        text = "Tokens that requests waited for, because host memory had them and the device did not."
        yield counter("vllm:external_prefix_cache_hits", text, labels, host.num_loaded_tokens)

    def _fetch_metrics(self, fetches: FetchCounts) -> Iterator[Metric]:
        for name, text, value in (
            ("fetches", "Fetches of blocks from other engines that ended.", fetches.num_fetches),
            ("fetch_failures", "Fetches that ended with an error.", fetches.num_failed_fetches),
            ("fetched_tokens", "Tokens whose blocks came from other engines.", fetches.num_fetched_tokens),
            ("fetched_bytes", "Bytes that came from other engines, of all ranks.", fetches.num_fetched_bytes),
            ("fetch_seconds", "Time that requests waited for fetches, in seconds.", fetches.seconds),
        ):
            yield counter(f"proa_engine_kv_{name}", text, self._labels, value)

    def _disk_metrics(self, disk: DiskOccupancy) -> Iterator[Metric]:
        labels, counts, reads = self._labels, disk.counts, disk.reads
        text = "Size of the KV cache's files on disk in bytes, of all ranks."
        yield gauge("lmcache:local_storage_usage", text, labels, counts.num_bytes)
        text = "Share of the configured size that the files on disk have, 0 to 1."
        yield gauge("proa_engine_kv_disk_usage_perc", text, labels, counts.num_bytes / max(counts.max_bytes, 1))
        yield gauge("proa_engine_kv_disk_blocks", "Blocks that all ranks have on disk.", labels, disk.num_blocks)
        for name, text, value in (
            ("reads", "Reads of prefixes from disk that ended.", reads.num_fetches),
            ("read_failures", "Reads that ended with an error.", reads.num_failed_fetches),
            ("read_tokens", "Tokens whose blocks came from disk.", reads.num_fetched_tokens),
            ("read_seconds", "Time that requests waited for reads from disk, in seconds.", reads.seconds),
            ("writes_skipped", "Blocks not written: too many waited, or writing stopped.", counts.num_skipped),
            ("damaged", "Blocks on disk that could not be read or had a wrong checksum.", counts.num_damaged),
            ("errors", "Errors of the disk, after each of which nothing is written for a minute.", counts.num_errors),
        ):
            yield counter(f"proa_engine_kv_disk_{name}", text, labels, value)

    def _waiting_by_reason(self, waiting: int, deferred: int) -> Metric:
        reasons = {"capacity": max(waiting - deferred, 0), "deferred": deferred}  # the two are read one after the other
        text = "Waiting requests by reason; deferred: for a grammar, an adapter's slot, or blocks from elsewhere."
        return gauge_by_label("vllm:num_requests_waiting_by_reason", text, self._labels, "reason", reasons)

    def _sleep_state(self, stats: SchedulerStats) -> Metric:
        states = ("awake", "weights_offloaded", "discard_all")
        return gauge_by_label(
            "vllm:engine_sleep_state",
            "1 for the engine's sleep_state, 0 for the others.",
            self._labels,
            "sleep_state",
            {state: float(stats.sleep_level == level) for level, state in enumerate(states)},
        )

    def _counters(self, stats: SchedulerStats, counters: CoreCounters) -> Iterator[Metric]:
        drafts = counters.drafts
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Requests preempted because the KV cache was full.", stats.num_preemptions),
            ("spec_decode_num_drafts", "Drafts verified, one per request and step.", drafts.num_drafts),
            ("spec_decode_num_draft_tokens", "Draft tokens verified.", drafts.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", drafts.num_accepted_tokens),
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens accepted, by place.",
                accepted_drafts(self._config.num_speculative_tokens, drafts),
            ),
            (
                "prompt_tokens",
                "Prompt and resumed tokens of started requests, computed or cached.",
                self._prompt_tokens,
            ),
            ("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", self._cached_tokens),
            ("prompt_tokens_by_source", "Prompt tokens by where they come from.", self._prompt_sources()),
            ("generation_tokens", "Generated tokens.", self._generation_tokens),
            ("request_success", "Finished requests, by finished_reason.", self._finishes),
            ("admission_rejections", "Refused requests, by gRPC status code as reason.", self._rejections),
        ):
            yield counter(f"vllm:{name}", text, self._labels, value)
        text = "Generated tokens that a grammar left no choice for, which were computed without being sampled."
        yield counter("proa_engine_grammar_forced_tokens", text, self._labels, counters.num_forced_tokens)
        yield counter("proa_engine_encoded_images", "Images encoded.", self._labels, counters.images.num_encoded)
        text = "Images of requests that were found encoded."
        yield counter("proa_engine_encoder_cache_hits", text, self._labels, counters.images.num_hits)
        text = "Audios encoded, for tokens in prompts or for cross-attention."
        yield counter("proa_engine_encoded_audios", text, self._labels, counters.audios.num_encoded)
        text = "Audios of requests that were found encoded."
        yield counter("proa_engine_encoded_audio_hits", text, self._labels, counters.audios.num_hits)

    def _prompt_sources(self) -> CounterByLabel:
        sources = CounterByLabel("source")
        sources.counts["local_compute"] = self._prompt_tokens - self._cached_tokens
        sources.counts["local_cache_hit"] = self._cached_tokens - self._loaded_tokens
        sources.counts["external_kv_transfer"] = self._loaded_tokens
        return sources

    def _render_histograms(self) -> Iterator[Metric]:
        for histogram in self._histograms:
            yield histogram.family(self._labels)
        labels = {
            "gen_ai_operation_name": "text_completion",
            "gen_ai_provider_name": PROVIDER_NAME,
            "gen_ai_request_model": self._config.model_name,
        }
        yield self._e2e.family(labels, "gen_ai_server_request_duration_seconds")
        yield self._first_token.family(labels, "gen_ai_server_time_to_first_token_seconds")
        yield self._per_token.family(labels, "gen_ai_server_time_per_output_token_seconds")

    def _observe_plain(self, request_ids: Sequence[str], now: float) -> None:
        """Count one token for each request. Takes no time per request while the ids are the same object."""
        if request_ids is self._plain_ids:
            self._inter_token.observe(now - self._plain_time, len(request_ids))
        else:
            self._last_token.update(dict.fromkeys(self._plain_ids, self._plain_time))
            for moment, count in Counter(map(self._last_token.get, request_ids)).items():
                if moment is not None:
                    self._inter_token.observe(now - moment, count)
        self._generation_tokens += len(request_ids)
        self._plain_ids, self._plain_time = request_ids, now

    def _observe_output(self, output: EngineCoreOutput, now: float) -> None:
        times = self._requests.get(output.request_id)
        if times is None:
            times = self._requests[output.request_id] = _RequestTimes()
        for event in output.events:
            self._observe_event(times, output, event)
        if count := len(output.new_token_ids):
            self._generation_tokens += count
            if last := self._last_token.get(output.request_id):
                self._inter_token.observe((now - last) / count, count)
            self._last_token[output.request_id] = now
        if output.finish_reason is not None:
            self._observe_finish(times, output, output.finish_reason, now)
            del self._requests[output.request_id]
            self._loras.pop(output.request_id, None)
            self._num_resumed.pop(output.request_id, None)
            self._last_token.pop(output.request_id, None)

    def _observe_event(self, times: _RequestTimes, output: EngineCoreOutput, event: Event) -> None:
        if event.type is EventType.QUEUED:
            times.queued = event.timestamp
        elif event.type is EventType.SCHEDULED:
            times.scheduled = event.timestamp
            self._queue.observe(event.timestamp - (times.queued or event.timestamp))
        elif event.type is EventType.FIRST_TOKEN:
            times.first_token = event.timestamp
            self._first_token.observe(event.timestamp - (times.queued or event.timestamp))
            self._prefill.observe(event.timestamp - (times.scheduled or event.timestamp))
            self._observe_prompt(output)
        elif event.type is EventType.PREEMPTED:
            times.num_preemptions += 1

    def _observe_prompt(self, output: EngineCoreOutput) -> None:
        """Count the prompt of a request whose prompt is computed, and the tokens it resumes, which are as a prompt."""
        num_tokens = (output.num_prompt_tokens or 0) + self._num_resumed.get(output.request_id, 0)
        num_cached = output.num_cached_tokens or 0
        self._prompt_tokens += num_tokens
        self._cached_tokens += num_cached
        if output.load is not None:
            self._loaded_tokens += min(output.load.num_tokens, num_cached)
        self._computed_tokens.observe(num_tokens - num_cached)

    def _observe_finish(self, times: _RequestTimes, output: EngineCoreOutput, reason: FinishReason, now: float) -> None:
        self._finishes.counts[reason.public_name] += 1
        self._preemptions.observe(times.num_preemptions)
        num_output_tokens = output.num_output_tokens or 0
        self._request_prompt_tokens.observe(output.num_prompt_tokens or 0)
        self._request_output_tokens.observe(num_output_tokens)
        self._e2e.observe(now - (times.queued or now))
        if times.scheduled:
            self._inference.observe(now - times.scheduled)
        if times.scheduled and not times.first_token and reason is FinishReason.STOP:  # prefill-only, or pooled
            self._observe_prompt(output)
        if times.first_token:
            self._decode.observe(now - times.first_token)
            if num_output_tokens > 1:
                self._per_token.observe((now - times.first_token) / (num_output_tokens - 1))

    def _add_histogram(self, name: str, text: str, bounds: Sequence[float] = REQUEST_BUCKETS) -> Histogram:
        self._histograms.append(Histogram(name, text, bounds))
        return self._histograms[-1]
