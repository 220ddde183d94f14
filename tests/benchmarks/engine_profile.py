"""Where a step's time goes on the device, kernel by kernel, against its floor: what explains a figure of `engine.py`.

Times are of one step, or of one prefill of the whole workload. The wall time is that of the same work without the
profiler, which slows the host; gaps are when no kernel runs between the first and the last. Without a GPU the same is
told of torch's operators, which shows that it works and nothing else.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from bench import Bench, timed
from floors import Card, Step, parts
from timeline import Span, analyse

_STEPS = 16


def measure(
    bench: Bench, workload: str, config: Mapping[str, Any], card: Card, *, context: int, fp8: bool
) -> dict[str, Any]:
    """A `Profile` as a record. `context` is that of a decode; `config` the model's config.json."""
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
    # Of a device all is seen whoever launches it, of operators by default this thread's alone.
    threads = None if on_gpu else _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[activity], experimental_config=threads) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [event for event in profiler.events() if event.device_type == device]
    return [Span(event.name, event.time_range.start, event.time_range.end) for event in events]


def card() -> Card:
    """What this machine's memory and matrix units give at best: a large copy, a large product."""
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
