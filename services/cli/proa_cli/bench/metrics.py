"""The figures of a benchmark, computed from its samples as vLLM computes them, where not said otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np

from proa_cli.bench.client import Sample

LATENCIES: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""Latencies by their name in flags and results: the name in the table, and its title."""
GOODPUT_LATENCIES: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of a latency, in milliseconds; 0 without values. `percentiles`: pairs of a percentage and the value."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """`key`: in the JSON results."""

    label: str
    key: str
    value: float


@dataclass(frozen=True, slots=True)
class Section:
    """Figures of one kind of load alone, below those of all."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Throughputs are per second of the whole run. Failed requests count only as `failed`."""

    seconds: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    chunks: int
    request_throughput: float
    request_goodput: float | None  # of requests within all the limits of --goodput; None without limits
    output_throughput: float
    total_token_throughput: float
    peak_output_throughput: float
    peak_concurrency: int
    latencies: Mapping[str, Statistics]


def time_per_output_token(sample: Sample) -> float | None:
    """Seconds, the first token left out; None for one token."""
    return (sample.latency - sample.ttft) / (sample.output_tokens - 1) if sample.output_tokens > 1 else None


def summarize(
    samples: Sequence[Sample],
    seconds: float,
    percentages: Sequence[float],
    limits: Mapping[str, float],
) -> Metrics:
    """`limits`: the latencies of --goodput in milliseconds, by their name."""
    good = [sample for sample in samples if not sample.error]
    outputs, inputs = sum(sample.output_tokens for sample in good), sum(sample.prompt_tokens for sample in good)
    values = {
        "ttft": [sample.ttft for sample in good],
        "tpot": [each for sample in good if (each := time_per_output_token(sample)) is not None],
        "itl": [gap for sample in good for gap in sample.gaps],
        "e2el": [sample.latency for sample in good],
    }
    within = sum(_is_within(sample, limits) for sample in good)
    return Metrics(
        seconds=seconds,
        completed=len(good),
        failed=len(samples) - len(good),
        input_tokens=inputs,
        output_tokens=outputs,
        chunks=sum(sample.chunks for sample in good),
        request_throughput=len(good) / seconds,
        request_goodput=within / seconds if limits else None,
        output_throughput=outputs / seconds,
        total_token_throughput=(inputs + outputs) / seconds,
        peak_output_throughput=peak_tokens(good),
        peak_concurrency=most_at_once([(sample.start, sample.start + sample.latency) for sample in good]),
        latencies={name: statistics(each, percentages) for name, each in values.items()},
    )


def statistics(seconds: Sequence[float], percentages: Sequence[float]) -> Statistics:
    array: np.ndarray[Any, np.dtype[np.float64]] = np.array(seconds or [0.0]) * 1e3
    percentiles = tuple((each, float(np.percentile(array, each))) for each in percentages)
    return Statistics(float(array.mean()), float(np.median(array)), float(array.std()), percentiles)


def peak_tokens(samples: Sequence[Sample]) -> float:
    """The most output tokens in a whole second after the start of the first request.

    The tokens of a response are divided evenly among its chunks, whose times are known; vLLM counts one for each chunk.
    """
    if not samples:
        return 0.0
    first = min(sample.start for sample in samples)
    last = max(sample.start + sample.latency for sample in samples)
    seconds = np.zeros(int(last - first) + 2)
    for sample in samples:
        if sample.chunks:
            times = np.cumsum([sample.start - first + sample.ttft, *sample.gaps])
            np.add.at(seconds, times.astype(int).clip(max=len(seconds) - 1), sample.output_tokens / sample.chunks)
    return float(seconds.max())


def most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
    """The most intervals that overlap at one moment."""
    steps = sorted([(start, 1) for start, _ in intervals] + [(end, -1) for _, end in intervals])
    return max(accumulate((step for _, step in steps), initial=0))


def _is_within(sample: Sample, limits: Mapping[str, float]) -> bool:
    values = {"ttft": sample.ttft, "tpot": time_per_output_token(sample) or 0.0, "e2el": sample.latency}
    return all(values[name] * 1e3 <= limit for name, limit in limits.items())
