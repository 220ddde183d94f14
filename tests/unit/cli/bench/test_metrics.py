"""The figures of a benchmark, from samples with exact numbers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from proa_cli.bench import latency, metrics, report, throughput
from proa_cli.bench.client import Sample
from proa_cli.bench.load import Elapsed, Measured
from proa_cli.bench.serve import notes

# Of `vllm bench serve`: without `rtfx`, of audio, and without what only some models and flags have.
ALWAYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency"),
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests"),
}
DETAILED = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    *("generated_texts", "errors"),
}
RUN = (
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency"),
)

FAST = Sample(
    start=10.0, ttft=0.1, latency=0.5, gaps=[0.2, 0.2], prompt_tokens=7, output_tokens=5, has_usage=True, text="fast"
)
SLOW = Sample(
    start=10.2, ttft=0.3, latency=1.3, gaps=[0.5, 0.5], prompt_tokens=3, output_tokens=3, has_usage=True, text="slow"
)
SINGLE = Sample(start=12.0, ttft=0.2, latency=0.2, prompt_tokens=1, output_tokens=1, has_usage=True)
BROKEN = Sample(start=10.0, ttft=9.0, latency=9.0, prompt_tokens=100, output_tokens=100, error="HTTP 500: no")
ALL = [FAST, SLOW, SINGLE, BROKEN]
MEASURED = Measured(ALL, 0, Elapsed(2.0, cpu=0.1))


def test_throughputs_count_the_requests_that_succeeded() -> None:
    found = metrics.summarize(ALL, 2.0, [50], {})
    assert (found.completed, found.failed) == (3, 1)
    assert (found.input_tokens, found.output_tokens, found.chunks) == (11, 9, 7)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (1.5, 4.5, 10.0)
    assert found.request_goodput is None


def test_latencies_are_in_milliseconds() -> None:
    found = metrics.summarize(ALL, 2.0, [50, 99.9], {}).latencies
    assert found["ttft"].mean == pytest.approx(200)
    assert found["ttft"].median == pytest.approx(200)
    assert found["ttft"].std == pytest.approx((20000 / 3) ** 0.5)
    assert found["tpot"].mean == pytest.approx((100 + 500) / 2)  # the request with one token has none
    assert found["itl"].mean == pytest.approx((200 + 200 + 500 + 500) / 4)
    assert [percentage for percentage, _ in found["e2el"].percentiles] == [50, 99.9]
    values = [value for _, value in found["e2el"].percentiles]
    assert values == pytest.approx([500, 1300 - 800 * 0.002])  # between the two largest, as numpy's default does


def test_goodput_is_of_requests_within_all_limits() -> None:
    assert metrics.summarize(ALL, 2.0, [], {"ttft": 250}).request_goodput == 1.0
    assert metrics.summarize(ALL, 2.0, [], {"ttft": 250, "e2el": 400}).request_goodput == 0.5
    assert metrics.summarize(ALL, 2.0, [], {"tpot": 100}).request_goodput == 1.0  # one token: 0 ms for each other
    assert metrics.summarize(ALL, 2.0, [], {"tpot": 10}).request_goodput == 0.5


def test_the_peak_second_has_the_tokens_of_its_chunks() -> None:
    # In the first second 5 tokens of FAST, in 3 chunks, and 1 of SLOW; in the next one 2 of SLOW, then 1 of SINGLE.
    assert metrics.peak_tokens([FAST, replace(SLOW, start=10.25), SINGLE]) == pytest.approx(6.0)
    assert metrics.peak_tokens([]) == 0.0


def test_requests_at_once_overlap_at_one_moment() -> None:
    assert metrics.summarize(ALL, 2.0, [], {}).peak_concurrency == 2
    assert metrics.most_at_once([(0, 1), (1, 2)]) == 1
    assert metrics.most_at_once([]) == 0


def test_without_a_success_all_figures_are_zero() -> None:
    found = metrics.summarize([BROKEN], 2.0, [99], {"ttft": 1})
    assert (found.completed, found.failed, found.request_goodput, found.peak_output_throughput) == (0, 1, 0.0, 0.0)
    assert found.latencies["itl"] == metrics.Statistics(0.0, 0.0, 0.0, ((99, 0.0),))


def keys(detailed: bool, *shown: str) -> set[str]:
    found = metrics.summarize(ALL, 2.0, [50, 99.9], {})
    return set(report.document(found, MEASURED, shown, dict.fromkeys(RUN), detailed=detailed))


def test_the_document_has_the_keys_of_vllm() -> None:
    figures = {
        f"{figure}_{name}_ms" for name in ("ttft", "e2el") for figure in ("mean", "median", "std", "p50", "p99.9")
    }
    assert keys(False, "ttft", "e2el") == ALWAYS | figures
    assert keys(True) == ALWAYS | DETAILED


def test_lists_of_the_document_have_an_entry_for_each_request() -> None:
    found = report.document(metrics.summarize(ALL, 2.0, [], {}), MEASURED, (), {}, detailed=True)
    assert found["output_lens"] == [5, 3, 1, 0]
    assert found["errors"] == ["", "", "", "HTTP 500: no"]
    assert all(len(found[name]) == 4 for name in DETAILED)


def test_offline_results_have_the_keys_and_values_of_vllm() -> None:
    assert throughput.results(2.0, 10, 100, 60) == {
        "elapsed_time": 2.0,
        "num_requests": 10,
        "total_num_tokens": 160,
        "requests_per_second": 5.0,
        "tokens_per_second": 80.0,
    }
    found = latency.results([1.0, 2.0, 3.0])
    assert (found["avg_latency"], found["latencies"]) == (2.0, [1.0, 2.0, 3.0])
    assert found["std_latency"] == pytest.approx((2 / 3) ** 0.5)
    assert found["percentiles"] == pytest.approx({10: 1.2, 25: 1.5, 50: 2.0, 75: 2.5, 90: 2.8, 99: 2.98})


def test_the_table_has_the_lines_of_vllm() -> None:
    found = replace(metrics.summarize(ALL, 2.0, [99.9], {"ttft": 250}))
    lines = report.table(found, ["ttft"], (), max_concurrency=8, request_rate=4.0).splitlines()
    assert lines[:3] == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3",
        "Failed requests:                         1",
    ]
    assert [line.partition(":")[0] for line in lines[3:13]] == [
        "Maximum request concurrency",
        "Request rate configured (RPS)",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Request goodput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
    ]
    assert lines[14:] == [
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          200.00",
        "Median TTFT (ms):                        200.00",
        "P99.9 TTFT (ms):                         299.80",
        "==================================================",
    ]


def test_appended_results_stand_on_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    for number in range(2):
        report.save(path, {"number": number}, append=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"number": 0}, {"number": 1}]
    report.save(path, {"number": 2}, append=False)
    assert json.loads(path.read_text()) == {"number": 2}


def test_notes_say_what_the_table_does_not() -> None:
    measured = Measured([*ALL, replace(SINGLE, has_usage=False)], 3, Elapsed(2.0, cpu=0.97))
    said = "\n".join(notes(metrics.summarize(measured.samples, 2.0, [], {}), measured))
    assert "1 requests failed, the first with: HTTP 500: no" in said
    assert "3 requests had not ended" in said
    assert "A chunk had 1.25 tokens on average" in said
    assert "1 responses had no usage" in said
    assert "0.97 cores" in said
    calm = Measured([SINGLE], 0, Elapsed(2.0, cpu=0.1))
    assert not list(notes(metrics.summarize([SINGLE], 2.0, [], {}), calm))
