"""Where a step's time goes on the device, kernel by kernel: the table that explains a figure of `engine.py`.

    python tests/benchmarks/engine_profile.py --model Llama-3.1-8B --profile decode-1

It needs a GPU. Times are of one step, or of one prefill of the whole workload. What the kernels leave of the wall time
is gaps between them and the host; the wall time is that of the same work without the profiler, which slows the host.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from real_shapes import write_model

import engine

_STEPS = 16


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a profile, in microseconds a step."""

    name: str
    calls: float
    microseconds: float


def profile(work: Callable[[], object], count: int) -> list[Kernel]:
    """The kernels of `work`, which is `count` steps long, the costliest first."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    kernels = [
        Kernel(event.key, event.count / count, event.self_device_time_total / count)
        for event in profiler.key_averages()
    ]
    return sorted((kernel for kernel in kernels if kernel.microseconds > 0), key=lambda kernel: -kernel.microseconds)


def table(kernels: Sequence[Kernel], wall: float, top: int) -> str:
    """Markdown. `wall` is microseconds a step without the profiler."""
    busy = sum(kernel.microseconds for kernel in kernels)
    calls = sum(kernel.calls for kernel in kernels)
    lines = ["| kernel | calls a step | µs a step | share of kernels |", "|---|---:|---:|---:|"]
    lines += [
        f"| `{kernel.name[:90]}` | {kernel.calls:.1f} | {kernel.microseconds:,.1f} | {kernel.microseconds / busy:.1%} |"
        for kernel in kernels[:top]
    ]
    lines.append(f"| all {len(kernels)} | {calls:.1f} | {busy:,.1f} | |")
    lines.append(f"| wall time without the profiler | | {wall:,.1f} | kernels are {busy / wall:.1%} of it |")
    return "\n".join(lines)


def measure(bench: engine.Bench, workload: str) -> tuple[list[Kernel], float]:
    """The kernels of a step, and the wall time of a step in microseconds."""
    kind, _, size = workload.partition("-")
    if kind == "decode":
        with bench.decoding(int(size)):
            wall = _timed(lambda: bench.step(_STEPS)) / _STEPS
            return profile(lambda: bench.step(_STEPS), _STEPS), wall * 1e6
    count, length = map(int, size.split("x"))
    wall = bench.prefill(count, length) / 1e3
    return profile(lambda: bench.prefill_once(count, length), 1), wall * 1e6


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(argv: Sequence[str]) -> None:
    parser = engine.parser()
    parser.description = __doc__
    parser.add_argument("--profile", nargs="+", metavar="WORKLOAD", required=True, help="decode-B or prefill-NxL")
    parser.add_argument("--top", type=int, default=25)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(arguments.model, Path(folder))
        vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
        bench = engine.Bench(model, engine.engine_arguments(arguments), vocab_size=vocab_size)
        for workload in arguments.profile:
            kernels, wall = measure(bench, workload)
            print(f"\n{arguments.model}, {workload}, {engine.machine()}\n\n{table(kernels, wall, arguments.top)}")


if __name__ == "__main__":
    main(sys.argv[1:])
