"""Profile a step kernel by kernel and compare it with its lower bound.

Times are of one step, or of one prefill of the whole workload. The wall time is measured without the profiler, which
slows the host. A gap is a time without a running kernel between the first and the last. Without a GPU, torch's
operators are profiled instead, only to check that this program runs.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.engine.bench import Bench, timed
from benchmarks.engine.floors import Card, Step, parts
from benchmarks.engine.timeline import Span, analyse

_STEPS = 16


def measure(
    bench: Bench, workload: str, config: Mapping[str, Any], card: Card, *, context: int, fp8: bool
) -> dict[str, Any]:
    """Returns a `Profile` as a dict. `context`: tokens before a decode; `config`: the model's config.json."""
    workload = bench.sample_as(workload)
    kind, _, size = workload.partition("-")
    if kind == "decode":
        with bench.decoding(int(size)):
            wall = timed(lambda: bench.step(_STEPS)) / _STEPS
            spans, count = record(lambda: bench.step(_STEPS)), _STEPS
    else:
        shape = tuple(map(int, size.split("x")))
        wall = statistics.median([bench.prefill_once(*shape) for _ in range(4)][1:])
        spans, count = record(lambda: bench.prefill_once(*shape)), 1
    step = Step.of_workload(workload, context)
    floor = {part.name: part.seconds(card) * 1e6 for part in parts(config, step, fp8=fp8)}
    return asdict(analyse(spans, count, wall * 1e6, floor)) | {"card": asdict(card)}


def record(work: Callable[[], object]) -> list[Span]:
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    # By default only the calling thread's operators are profiled; the device's kernels always all are.
    threads = None if on_gpu else _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[activity], experimental_config=threads) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    kinds: Any = torch.autograd.DeviceType  # type: ignore[attr-defined]  # not in __all__
    device = kinds.CUDA if on_gpu else kinds.CPU
    events = [event for event in profiler.events() if event.device_type == device]
    return [Span(event.name, event.time_range.start, event.time_range.end) for event in events]


def card() -> Card:
    """This machine's bandwidth and matrix rate, measured by a large copy and a large matrix product."""
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    source = torch.empty(1 << (30 if on_gpu else 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    side = 8192 if on_gpu else 128
    matrix = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    copy = _median_seconds(lambda: target.copy_(source), on_gpu)
    product = _median_seconds(lambda: matrix @ matrix, on_gpu)
    return Card(2 * source.numel() / copy, 2 * side**3 / product)


def _median_seconds(work: Callable[[], object], on_gpu: bool) -> float:
    import torch

    times = []
    for _ in range(12):
        started = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])
