"""The results of `proa bench serve`: vLLM's table, and its JSON document."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from proa_cli.bench.load import Measured
from proa_cli.bench.metrics import LATENCIES, Metrics, Section

_WIDTH = 50


def table(
    metrics: Metrics,
    shown: Sequence[str],
    sections: Sequence[Section],
    *,
    max_concurrency: int | None,
    request_rate: float | None,
) -> str:
    """`shown`: names of latencies."""
    return "\n".join(_lines(metrics, shown, sections, max_concurrency, request_rate))


def _lines(
    metrics: Metrics,
    shown: Sequence[str],
    sections: Sequence[Section],
    max_concurrency: int | None,
    request_rate: float | None,
) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests", metrics.completed)
    yield _line("Failed requests", metrics.failed)
    if max_concurrency is not None:
        yield _line("Maximum request concurrency", max_concurrency)
    if request_rate is not None:
        yield _line("Request rate configured (RPS)", request_rate)
    yield _line("Benchmark duration (s)", metrics.seconds)
    yield _line("Total input tokens", metrics.input_tokens)
    yield _line("Total generated tokens", metrics.output_tokens)
    yield _line("Request throughput (req/s)", metrics.request_throughput)
    if metrics.request_goodput is not None:
        yield _line("Request goodput (req/s)", metrics.request_goodput)
    yield _line("Output token throughput (tok/s)", metrics.output_throughput)
    yield _line("Peak output token throughput (tok/s)", metrics.peak_output_throughput)
    yield _line("Peak concurrent requests", metrics.peak_concurrency)
    yield _line("Total token throughput (tok/s)", metrics.total_token_throughput)
    for name in (each for each in LATENCIES if each in shown):
        short, title = LATENCIES[name]
        statistics = metrics.latencies[name]
        yield f"{title:-^{_WIDTH}}"
        yield _line(f"Mean {short} (ms)", statistics.mean)
        yield _line(f"Median {short} (ms)", statistics.median)
        for percentage, value in statistics.percentiles:
            yield _line(f"P{_percentage(percentage)} {short} (ms)", value)
    for section in sections:
        yield f"{section.title:-^{_WIDTH}}"
        for row in section.rows:
            yield _line(row.label, row.value)
    yield "=" * _WIDTH


def _line(name: str, value: float) -> str:
    return f"{name + ':':<40} {value if isinstance(value, int) else f'{value:.2f}'}"


def _percentage(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def document(
    metrics: Metrics, measured: Measured, shown: Sequence[str], run: Mapping[str, Any], *, detailed: bool
) -> dict[str, Any]:
    """The results under vLLM's keys. `run`: what was measured, and how; `detailed`: with a list for each request."""
    samples = measured.samples
    figures: dict[str, Any] = {
        **run,
        "duration": metrics.seconds,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.input_tokens,
        "total_output_tokens": metrics.output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.peak_output_throughput,
        "max_concurrent_requests": metrics.peak_concurrency,
    }
    if detailed:
        figures |= {
            "input_lens": [sample.prompt_tokens for sample in samples],
            "output_lens": [0 if sample.error else sample.output_tokens for sample in samples],
            "ttfts": [sample.ttft for sample in samples],
            "itls": [sample.gaps for sample in samples],
            "latencies": [sample.latency for sample in samples],
            "start_times": [sample.start for sample in samples],
            "queue_times": [sample.queued for sample in samples],
            "generated_texts": [sample.text for sample in samples],
            "errors": [sample.error for sample in samples],
        }
    for name in (each for each in LATENCIES if each in shown):
        statistics = metrics.latencies[name]
        figures[f"mean_{name}_ms"] = statistics.mean
        figures[f"median_{name}_ms"] = statistics.median
        figures[f"std_{name}_ms"] = statistics.std
        for percentage, value in statistics.percentiles:
            figures[f"p{_percentage(percentage)}_{name}_ms"] = value
    return figures | {row.key: row.value for section in measured.sections for row in section.rows}


def save(path: Path, results: Mapping[str, Any], *, append: bool) -> None:
    """Write a document; `append`: on a line after those that the file has. Makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results)
    if append and path.exists() and path.stat().st_size:
        text = f"\n{text}"
    with path.open("a" if append else "w") as file:
        file.write(text)
