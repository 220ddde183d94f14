"""The engine logs a line of throughput and load while it is busy, in vLLM's words."""

import asyncio
import logging

import pytest

from proa.contract import SchedulerStats
from proa_engine.core.counters import DraftCounts
from proa_engine.observability.stats_log import Interval, StatsLog, Totals, log_stats

BUSY = SchedulerStats(
    num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.125, prefix_cache_queries=400, prefix_cache_hits=100
)


def line(interval: Interval | None) -> str:
    assert interval is not None
    return interval.line("KV cache")


def test_the_line_is_worded_as_vllms() -> None:
    interval = StatsLog(Totals(prompt_tokens=100)).next(Totals(350, 1234, BUSY), seconds=10.0)
    assert line(interval) == (
        "Avg prompt throughput: 25.0 tokens/s, Avg generation throughput: 123.4 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )


def test_an_idle_engine_logs_once_and_then_nothing() -> None:
    log = StatsLog(Totals())
    assert log.next(Totals(), 10.0) is None
    assert log.next(Totals(5, 5, BUSY), 10.0) is not None
    last = log.next(Totals(5, 5), 10.0)
    assert line(last).startswith(
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0"
    )
    assert log.next(Totals(5, 5), 10.0) is None


def test_a_request_that_waits_is_work_too() -> None:
    assert StatsLog(Totals()).next(Totals(stats=SchedulerStats(num_waiting_reqs=1)), 10.0) is not None


def test_the_hit_rate_is_that_of_the_last_lookups() -> None:
    log = StatsLog(Totals(stats=SchedulerStats(prefix_cache_queries=1000)))
    stats = SchedulerStats(num_running_reqs=1, prefix_cache_queries=1100, prefix_cache_hits=80)
    assert "Prefix cache hit rate: 80.0%" in line(log.next(Totals(stats=stats), 10.0))
    assert "Prefix cache hit rate: 80.0%" in line(log.next(Totals(stats=stats), 10.0))


def test_drafts_and_preemptions_are_shown_where_there_are_some() -> None:
    totals = Totals(
        stats=SchedulerStats(num_running_reqs=1, num_preemptions=2),
        drafts=DraftCounts(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=30),
    )
    assert line(StatsLog(Totals()).next(totals, 10.0)).endswith(
        ", Avg Draft acceptance rate: 75.0%, Mean acceptance length: 4.00, Preempted: 2 times"
    )


@pytest.mark.parametrize(("on_gpu", "kv_cache"), [(True, "reqs, GPU KV cache usage"), (False, "reqs, KV cache usage")])
async def test_lines_have_their_figures_as_fields_and_name_a_gpu_only_on_one(
    on_gpu: bool, kv_cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="proa_engine.observability.stats_log")
    totals = iter([Totals(), Totals(10, 20, BUSY)])
    task = asyncio.create_task(log_stats(lambda: next(totals, Totals(10, 20)), on_gpu=on_gpu, seconds=0.01))
    async with asyncio.timeout(10):
        while len(caplog.records) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()
    assert kv_cache in caplog.records[0].message
    fields = vars(caplog.records[0])["proa_fields"]
    assert fields["num_running"] == 3
    assert fields["generation_tokens_per_second"] > 0
    assert "draft_acceptance_rate" not in fields
