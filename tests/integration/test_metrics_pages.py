"""The metrics pages of engine and gateway: the engine's from a real core, the gateway's from direct calls."""

import random
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app

from proa.blocks import checkpoint_positions
from proa.contract import (
    EngineCoreOutput,
    EngineCoreRequest,
    Event,
    EventType,
    FinishReason,
    KvSource,
    SamplingParams,
    SchedulerStats,
)
from proa.wsgi_server import serve_wsgi
from proa_engine.config import EngineConfig
from proa_engine.core.counters import CoreCounters, DraftCounts
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.kv.mover import DiskChanges, Fetched
from proa_engine.core.kv_events import KvChanges
from proa_engine.core.scheduler import Scheduler
from proa_engine.core.scheduler_config import SchedulerConfig
from proa_engine.core.types import DiskCounts, PlainTokens, StepOutputs
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.observability.metrics import EngineMetrics
from proa_engine.option_groups import LoraOptions
from proa_gateway.engines.client import BreakerState, EngineClient
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.outcome import Outcome
from proa_gateway.routing.index import PrefixIndex
from proa_gateway.scaler.demand import Demand
from support.core import CoreRun, make_request
from support.core import hash_block as core_hash_block
from support.fake_disk import FakeDisk
from support.fake_executor import FakeExecutor
from support.processes import free_port
from support.scrape import Scrape

CONFIG = EngineConfig(model="m", block_size=4)
CACHE = CacheGroups(num_blocks=64, block_size=4)
SIZES: Any = {"cache_groups": CACHE, "max_model_len": 64}


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes | str]) -> bytes:
    return repr((parent, tuple(token_ids), tuple(extra_keys))).encode()


def request(request_id: str, *, prompt: Sequence[int] = tuple(range(9)), max_tokens: int = 5) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params, arrival_time=time.time()
    )


def make_core() -> EngineCore:
    config = SchedulerConfig(
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_waiting_requests=8,
        eos_token_ids=frozenset({60}),
    )
    manager = KVCacheManager(CACHE, hash_block=hash_block)
    return EngineCore(Scheduler(config, manager), FakeExecutor(num_blocks=64, block_size=4))


def run_core(
    core: EngineCore, metrics: EngineMetrics, *rounds: list[EngineCoreRequest], abort: Sequence[str] = ()
) -> None:
    """Run each round of requests to its end, and abort some after the first step of the last round."""
    for requests in rounds:
        for each in requests:
            metrics.observe_request(each)
            core.submit(each)
        while core.has_unfinished_requests():
            if (outputs := core.step()) is not None:
                metrics.observe_outputs(outputs)
            if abort:
                core.abort(abort)
                abort = ()


def scrape(registry: CollectorRegistry) -> Scrape:
    return Scrape(generate_latest(registry).decode())


def test_engine_page_counts_the_cores_work() -> None:
    registry = CollectorRegistry()
    core = make_core()
    metrics = EngineMetrics(registry, CONFIG, **SIZES, stats=core.stats)
    run_core(core, metrics, [request("a"), request("b", prompt=range(20, 32))], [request("again")])
    page = scrape(registry)
    assert page.value("vllm:generation_tokens_total", model_name="m", engine="0") == 15
    assert page.value("vllm:prompt_tokens_total") == 9 + 12 + 9
    assert page.value("vllm:prefix_cache_queries_total") > 0
    assert page.value("vllm:prefix_cache_hits_total") == page.value("vllm:prompt_tokens_cached_total") == 8
    assert page.value("vllm:request_success_total", finished_reason="length") == 3
    assert page.value("vllm:request_success_total", finished_reason="abort") == 0
    assert page.value("vllm:num_requests_running") == page.value("vllm:num_requests_waiting") == 0
    assert page.value("vllm:kv_cache_usage_perc") == 0
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert page.value(f"vllm:{name}_seconds_count") == 3
    assert page.value("vllm:inter_token_latency_seconds_count") == 12  # five tokens have four gaps
    assert page.value("gen_ai_server_time_to_first_token_seconds_count", gen_ai_request_model="m") == 3
    assert page.value("vllm:request_prompt_tokens_sum") == 30
    assert page.value("vllm:iteration_tokens_total_count") == 10  # five steps of two requests, five of one
    assert page.value("vllm:iteration_tokens_total_sum") == 30 + 15
    assert page.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 8
    assert page.value("vllm:prompt_tokens_by_source_total") == 30
    assert page.value("vllm:request_prefill_kv_computed_tokens_sum") == 30 - 8
    assert page.value("vllm:request_num_preemptions_bucket", le="0.0") == 3


def test_tokens_that_a_request_resumes_count_as_its_prompts() -> None:
    """What it finds in the cache may be more than its own prompt."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, CONFIG, **SIZES)
    whole = range(24)
    resumed = replace(request("b", prompt=whole[:9], max_tokens=20), resumed_token_ids=list(whole[9:]))
    run_core(make_core(), metrics, [request("a", prompt=whole)], [resumed])
    page = scrape(registry)
    assert page.value("vllm:prompt_tokens_total") == 24 + 24
    assert page.value("vllm:prompt_tokens_cached_total") == 20
    assert page.value("vllm:prompt_tokens_by_source_total", source="local_compute") == 28
    assert page.value("vllm:request_prefill_kv_computed_tokens_sum") == 28
    assert metrics.totals().prompt_tokens == 28


def test_preemptions_and_reasons_of_waiting_are_counted() -> None:
    registry = CollectorRegistry()
    stats, counters = SchedulerStats(num_waiting_reqs=5), CoreCounters(num_deferred_reqs=2)
    metrics = EngineMetrics(registry, CONFIG, **SIZES, stats=lambda: stats, counters=lambda: counters)
    events = [Event(EventType.SCHEDULED, 1.0), *[Event(EventType.PREEMPTED, 2.0)] * 2]
    output = EngineCoreOutput(request_id="a", events=events, finish_reason=FinishReason.ABORT)
    metrics.observe_outputs(StepOutputs([output], 3.0, 1))
    page = scrape(registry)
    assert page.value("vllm:request_num_preemptions_sum") == 2
    assert page.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert page.value("vllm:num_requests_waiting_by_reason", reason="deferred") == 2


def test_engine_page_tells_what_host_memory_holds_and_gave() -> None:
    host = HostTierConfig(num_pages=22, page_bytes=100)
    run = CoreRun(num_blocks=8, async_scheduling=False, host=host)
    metrics = EngineMetrics(registry := CollectorRegistry(), CONFIG, **SIZES, counters=run.core.counters)
    for name, prompt in (("a", range(17)), ("other", range(20, 48)), ("again", range(17))):
        run.submit(make_request(name, prompt, max_tokens=1))
        while run.core.has_unfinished_requests():
            if (outputs := run.core.step()) is not None:
                metrics.observe_outputs(outputs)
    page = scrape(registry)
    assert page.value("vllm:kv_offload_total_bytes_total", transfer_type="GPU_to_CPU") == 100 * (4 + 7)
    assert page.value("vllm:kv_offload_total_bytes_total", transfer_type="CPU_to_GPU") == 100 * 3
    assert page.value("vllm:kv_offload_cpu_cache_usage_perc") == 0.5
    assert page.value("vllm:kv_offload_stores_skipped_total") == 0
    assert page.value("vllm:external_prefix_cache_hits_total") == 12
    assert page.value("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 12
    assert page.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 4


def test_a_prompt_that_is_only_computed_counts_as_a_prompt() -> None:
    metrics = EngineMetrics(registry := CollectorRegistry(), CONFIG, **SIZES)
    prefill = replace(request("a", prompt=range(13)), prefill_only=True)
    run_core(make_core(), metrics, [prefill], [request("b", prompt=range(17), max_tokens=1)])
    page = scrape(registry)
    assert page.value("vllm:prompt_tokens_total") == 13 + 17
    assert page.value("vllm:prompt_tokens_cached_total") == 12
    assert page.value("vllm:request_success_total", finished_reason="stop") == 1
    assert page.value("vllm:generation_tokens_total") == 1
    assert page.value("vllm:time_to_first_token_seconds_count") == 1


def test_engine_page_tells_what_came_from_other_engines() -> None:
    run = CoreRun(host=HostTierConfig(num_pages=22), fetches=random.Random(1))
    metrics = EngineMetrics(registry := CollectorRegistry(), CONFIG, **SIZES, counters=run.core.counters)
    assert run.mover is not None
    run.core.submit(replace(make_request(prompt=range(17)), kv_source=KvSource(addresses=("peer:1",))))
    run.step()
    (job,) = run.mover.jobs.values()
    run.core.take_from_mover(Fetched(job_id=job.job_id, num_blocks=0, num_bytes=70, is_done=True, error="refused"))
    run.mover.jobs.clear()
    while run.core.has_unfinished_requests():
        if (outputs := run.core.step()) is not None:
            metrics.observe_outputs(outputs)
    page = scrape(registry)
    assert page.value("proa_engine_kv_fetches_total") == 1
    assert page.value("proa_engine_kv_fetch_failures_total") == 1
    assert page.value("proa_engine_kv_fetched_bytes_total") == 70
    assert page.value("proa_engine_kv_fetch_seconds_total") > 0


def test_engine_page_tells_what_came_from_disk() -> None:
    run = CoreRun(host=HostTierConfig(num_pages=22), fetches=random.Random(1), disk=FakeDisk())
    EngineMetrics(registry := CollectorRegistry(), CONFIG, **SIZES, counters=run.core.counters)
    assert run.mover is not None
    prompt, hashes = range(17), KvChanges()
    parent = b"root"
    for start in range(0, 16, 4):
        parent = core_hash_block(parent, prompt[start : start + 4], [])
        hashes.store(parent)
    counts = DiskCounts(
        num_bytes=300,
        max_bytes=400,
        num_written_bytes=500,
        num_read_bytes=70,
        num_skipped=8,
        num_damaged=9,
        num_errors=2,
    )
    run.core.take_from_mover(DiskChanges(blocks=hashes, checkpoints=KvChanges(), counts=counts))
    run.core.submit(make_request(prompt=prompt))
    run.core.step()
    (job,) = run.mover.jobs.values()
    run.core.abort(["a"])  # its pages hold nothing
    run.core.take_from_mover(Fetched(job_id=job.job_id, num_blocks=3, num_bytes=70, is_done=True, error="damaged"))
    run.core.step()
    page = scrape(registry)
    assert page.value("vllm:kv_offload_total_bytes_total", transfer_type="CPU_to_disk") == 500
    assert page.value("vllm:kv_offload_total_bytes_total", transfer_type="disk_to_CPU") == 70
    assert page.value("lmcache:local_storage_usage") == 300
    assert page.value("proa_engine_kv_disk_usage_perc") == 0.75
    assert page.value("proa_engine_kv_disk_blocks") == 4
    assert page.value("proa_engine_kv_disk_reads_total") == 1
    assert page.value("proa_engine_kv_disk_read_failures_total") == 1
    assert page.value("proa_engine_kv_disk_read_tokens_total") == 12
    assert page.value("proa_engine_kv_disk_read_seconds_total") > 0
    assert page.value("proa_engine_kv_disk_writes_skipped_total") == 8
    assert page.value("proa_engine_kv_disk_damaged_total") == 9
    assert page.value("proa_engine_kv_disk_errors_total") == 2
    assert page.value("proa_engine_kv_fetches_total") == 0


def test_engine_page_tells_what_the_cache_holds() -> None:
    groups = CacheGroups(
        num_blocks=64, block_size=4, windows=(8,), num_state_slots=6, checkpoint_interval=512, max_step_tokens=64
    )
    manager = KVCacheManager(groups, hash_block=hash_block, checkpoint_positions=checkpoint_positions)
    config = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_waiting_requests=8)
    executor = FakeExecutor(num_blocks=64, block_size=4, windows=(8,), num_state_slots=6)
    core = EngineCore(Scheduler(config, manager), executor)
    EngineMetrics(registry := CollectorRegistry(), CONFIG, **SIZES, counters=core.counters)
    for name in "ab":
        core.submit(request(name, prompt=range(13), max_tokens=2))
        core.step()
        assert scrape(registry).value("proa_engine_state_slots", use="used") == 1
        while core.has_unfinished_requests():
            core.step()
    page = scrape(registry)
    assert page.value("proa_engine_prefix_cache_blocks", table="0") == 3
    assert page.value("proa_engine_prefix_cache_blocks", table="1") == 2
    assert page.value("proa_engine_prefix_cache_checkpoints") == 1
    assert page.value("proa_engine_state_slots", use="used") == 0
    assert page.value("proa_engine_state_slots", use="cached") == 1
    assert page.value("proa_engine_state_slots", use="free") == 5


def test_aborted_request_is_counted_and_its_state_removed() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, CONFIG, **SIZES)
    run_core(make_core(), metrics, [request("a", max_tokens=50)], abort=["a"])
    page = scrape(registry)
    assert page.value("vllm:request_success_total", finished_reason="abort") == 1
    assert not metrics._requests
    assert not metrics._last_token


def test_metrics_for_endpoint_pickers_exist_from_the_start() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry, CONFIG, **SIZES)
    page = scrape(registry)
    assert page.value("proa_engine_info", role="both") == 1
    assert page.names >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
    }
    sizes = {"num_gpu_blocks": "64", "kv_cache_size_tokens": "256", "kv_cache_max_concurrency": "4.00"}
    assert page.value("vllm:cache_config_info", block_size="4", **sizes) == 1
    assert page.types["vllm:num_requests_running"] == "gauge"
    assert page.types["vllm:time_to_first_token_seconds"] == "histogram"


def test_latency_buckets_start_at_one_millisecond() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry, CONFIG, **SIZES)
    GatewayMetrics(gateway := CollectorRegistry())
    for each in (registry, gateway):
        bounds: dict[str, float] = {}
        for (name, labels), _ in scrape(each).samples.items():
            if name.endswith("_seconds_bucket"):
                bounds[name] = min(bounds.get(name, 1.0), float(dict(labels)["le"]))
        assert set(bounds.values()) <= {0.001}


def test_latencies_are_counted_in_their_buckets() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, CONFIG, **SIZES)
    moments = [(EventType.QUEUED, 10.0), (EventType.SCHEDULED, 10.25), (EventType.FIRST_TOKEN, 12.0)]
    first = EngineCoreOutput(
        request_id="a", new_token_ids=[1], events=[Event(*each) for each in moments], num_prompt_tokens=3
    )
    metrics.observe_outputs(StepOutputs([first], 12.0, 1))
    for now in (12.0015, 12.0115):
        metrics.observe_outputs(StepOutputs([], now, 1, PlainTokens(["a"], [1])))
    page = scrape(registry)
    assert page.value("vllm:request_queue_time_seconds_sum") == pytest.approx(0.25)
    assert page.value("vllm:request_prefill_time_seconds_sum") == pytest.approx(1.75)
    assert page.value("vllm:time_to_first_token_seconds_sum") == pytest.approx(2.0)
    assert page.value("vllm:inter_token_latency_seconds_bucket", le="0.001") == 0
    assert page.value("vllm:inter_token_latency_seconds_bucket", le="0.002") == 1
    assert page.value("vllm:inter_token_latency_seconds_bucket", le="0.015") == 2


@pytest.mark.parametrize(("level", "state"), list(enumerate(["awake", "weights_offloaded", "discard_all"])))
def test_one_sleep_state_holds(level: int, state: str) -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry, CONFIG, **SIZES, stats=lambda: SchedulerStats(sleep_level=level))
    page = scrape(registry)
    assert page.value("vllm:engine_sleep_state", sleep_state=state) == 1
    assert page.value("vllm:engine_sleep_state") == 1  # the sum


def test_engine_page_is_served_until_stopped() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry, CONFIG, **SIZES)
    port = free_port()
    stop = serve_wsgi(make_wsgi_app(registry), "127.0.0.1", port, name="proa-metrics")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = Scrape(answer.read().decode())
    stop()
    assert "vllm:num_requests_running" in page.names
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_accepted_drafts_are_counted_for_each_position() -> None:
    registry = CollectorRegistry()
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    counters = CoreCounters(drafts=DraftCounts(num_accepted_per_position=[5, 2]))
    EngineMetrics(registry, replace(CONFIG, speculative_config=speculation), **SIZES, counters=lambda: counters)
    page = scrape(registry)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [page.value(name, position=str(position)) for position in range(3)] == [5, 2, 0]


def test_draft_tokens_are_counted_by_how_many_a_step_had_room_for_and_by_the_way_to_draw() -> None:
    registry = CollectorRegistry()
    speculation = SpeculativeConfig(method="eagle3", model="d", num_speculative_tokens=3)
    drafts = DraftCounts(num_planned=Counter({3: 5, 1: 2}), num_matches=Counter({(0, 0): 4, (2, 3): 1}))
    counters = CoreCounters(drafts=drafts)
    EngineMetrics(registry, replace(CONFIG, speculative_config=speculation), **SIZES, counters=lambda: counters)
    page = scrape(registry)
    planned = "proa_engine_draft_tokens_planned"
    assert [page.value(f"{planned}_bucket", le=bound) for bound in ("1.0", "2.0", "3.0")] == [2, 2, 7]
    assert page.value(f"{planned}_sum") == 17
    name = "proa_engine_draft_matches_total"
    assert page.value(name, way="greedy", temperature="0-0.2") == 4
    assert page.value(name, way="full", temperature="0.85-") == 1
    assert page.value(name, way="half", temperature="0.2-0.5") == 0


def engine(address: str, *, model_name: str | None) -> EngineClient:
    """An engine as metrics read it; one without a session has no model."""
    stats = SchedulerStats(
        num_running_reqs=3,
        num_waiting_reqs=4,
        kv_cache_usage=0.5,
        prefix_cache_queries=9,
        prefix_cache_hits=5,
        num_preemptions=2,
    )
    fields = {
        "load_stats": stats,
        "kv_cache_usage": stats.kv_cache_usage,
        "breaker_state": BreakerState.OPEN,
        "suspect": True,
        "refusal": "",
        "sessions": None,
    }
    return cast(EngineClient, SimpleNamespace(address=address, model_name=model_name, **fields))


chat = partial(Outcome, route="/v1/chat/completions", operation="chat")


def test_a_gateways_page_has_requests_generations_and_the_state_of_each_engine() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.observe_request("/v1/chat/completions", 200, "engine_timeout")
    metrics.observe_rejection("requests")
    outcome = chat(
        model="m",
        base_model="m",
        duration=1.1,
        time_to_first_token=0.1,
        input_tokens=7,
        output_tokens=11,
        finishes={"stop": 1},
    )
    metrics.observe_outcome(outcome)
    metrics.observe_outcome(
        chat(
            model="m",
            base_model="m",
            duration=5.0,
            status=503,
            error_type="engine_lost",
        )
    )
    metrics.pool.watch([engine("a:1", model_name="m"), engine("b:1", model_name=None)], PrefixIndex(), Demand(()))
    page = Scrape(metrics.render().decode())
    answers = {"route": "/v1/chat/completions", "status": "200"}
    assert page.value("proa_gateway_requests_total", **answers) == 2
    assert page.value("proa_gateway_requests_total", **answers, error_type="engine_timeout") == 1
    assert page.value("proa_gateway_finished_sequences_total", gen_ai_request_model="m", reason="stop") == 1
    assert page.value("proa_gateway_admission_rejections_total", reason="requests") == 1
    assert page.value("gen_ai_server_request_duration_seconds_count", error_type="") == 1
    assert page.value("gen_ai_server_request_duration_seconds_count", error_type="engine_lost") == 1
    assert page.value("gen_ai_server_time_to_first_token_seconds_count") == 1
    assert page.value("gen_ai_server_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert page.value("vllm:num_requests_running", engine="a:1") == 3
    assert page.value("vllm:num_requests_waiting", engine="a:1") == 4
    assert page.value("vllm:kv_cache_usage_perc", engine="a:1") == 0.5
    assert page.value("proa_gateway_engine_breaker_state", engine="a:1") == 2
    assert page.value("proa_gateway_engine_suspect", engine="a:1") == 1
    assert page.value("proa_gateway_sessions") == 1
    assert page.value("proa_gateway_routing_index_blocks") == 0
    with pytest.raises(KeyError):
        page.value("vllm:num_requests_running", engine="b:1")


def test_a_gateways_page_has_vllms_metrics_of_requests_and_engines() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    outcome = chat(
        model="lora",
        base_model="m",
        duration=1.1,
        time_to_first_token=0.1,
        input_tokens=7,
        output_tokens=11,
        finishes={"stop": 1},
        longest_output=6,
        num_choices=2,
        max_tokens=50,
    )
    metrics.observe_outcome(outcome)
    outcome = chat(
        model="m",
        base_model="m",
        duration=5.0,
        input_tokens=3,
        status=503,
        error_type="engine_lost",
    )
    metrics.observe_outcome(outcome)
    metrics.observe_outcome(
        chat(
            model="",
            base_model="",
            duration=5.0,
            status=404,
            error_type="model_not_found",
        )
    )
    left = chat(
        model="m",
        base_model="m",
        status=499,
        error_type="left",
        finishes={"client_disconnected": 1},
    )
    metrics.observe_outcome(left)
    metrics.pool.watch([engine("a:1", model_name="m")], PrefixIndex(), Demand(()))
    page = Scrape(metrics.render().decode())
    assert page.value("vllm:prompt_tokens_total", model_name="m") == 10
    assert page.value("vllm:generation_tokens_total", model_name="m") == 11
    assert page.value("vllm:request_success_total", finished_reason="stop") == 1
    assert page.value("vllm:request_success_total", finished_reason="abort") == 1
    for name, total in {
        "time_to_first_token_seconds": 0.1,
        "e2e_request_latency_seconds": 1.1,
        "request_time_per_output_token_seconds": 0.1,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 11,
        "request_max_num_generation_tokens": 6,
        "request_params_n": 2,
        "request_params_max_tokens": 50,
    }.items():
        assert page.value(f"vllm:{name}_count", model_name="m") == 1
        assert page.value(f"vllm:{name}_sum") == pytest.approx(total)
    assert page.value("vllm:prefix_cache_queries_total", engine="a:1") == 9
    assert page.value("vllm:prefix_cache_hits_total", engine="a:1") == 5
    assert page.value("vllm:num_preemptions_total", engine="a:1") == 2
    assert not any('model_name=""' in line for line in metrics.render().decode().splitlines())


def test_adapters_are_waiting_until_their_first_step_and_then_running() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, replace(CONFIG, lora=LoraOptions(enable_lora=True, max_loras=3)), **SIZES)

    def labels() -> tuple[str, str]:
        page = generate_latest(registry).decode()
        (line,) = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{")]
        found = dict(re.findall(r'(\w+)="([^"]*)"', line))
        assert found["max_lora"] == "3"
        return found["running_lora_adapters"], found["waiting_lora_adapters"]

    for request_id, name in (("1", "sql"), ("2", "law"), ("3", "law"), ("4", "")):
        metrics.observe_request(
            EngineCoreRequest(
                request_id=request_id, prompt_token_ids=[1], sampling_params=SamplingParams(), lora_name=name
            )
        )
    assert labels() == ("", "law,sql")
    scheduled = [Event(type=EventType.SCHEDULED, timestamp=1.0)]
    first = [EngineCoreOutput(request_id=each, new_token_ids=[5], events=scheduled) for each in ("1", "2", "4")]
    metrics.observe_outputs(StepOutputs(first, 1.0, 1))
    assert labels() == ("law,sql", "law")
    metrics.observe_rejection("not_found", "3")
    last = [EngineCoreOutput(request_id="1", finish_reason=FinishReason.STOP)]
    metrics.observe_outputs(StepOutputs(last, 2.0, 2))
    assert labels() == ("law", "")
