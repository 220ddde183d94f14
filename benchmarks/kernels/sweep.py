"""How products are timed alone on a GPU, and what the programs that do it share: cold weights, and rows as a record.

Weights come in enough copies that none is found in the L2 cache; each figure is of one product within a CUDA graph.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.records import Recording

BANDWIDTH = 4.25e12  # bytes a second, an H200's, read
COLD_BYTES = 300e6  # more than any L2 cache holds


def num_copies(num_bytes: float) -> int:
    """Of weights of so many bytes, that are not found in a cache. Without a GPU one, only to check that it runs."""
    return int(COLD_BYTES / num_bytes) + 1 if torch.cuda.is_available() else 1


def time_each(products: Sequence[Callable[[], object]]) -> float:
    """Seconds of one, on the average. Without a GPU each is run once, only to check that it runs."""
    if not torch.cuda.is_available():
        started = time.perf_counter()
        for product in products:
            product()
        return (time.perf_counter() - started) / len(products)
    milliseconds: float = triton.testing.do_bench_cudagraph(lambda: [product() for product in products])
    return milliseconds * 1e-3 / len(products)


def run_sweep(models: Sequence[str], time_model: Callable[[str], Iterable[dict[str, Any]]], path: Path | None) -> None:
    """Print each model's rows as they come, and record them; a record is complete behind the model's last row."""
    recording = Recording(path)
    for model in models:
        rows = []
        for row in time_model(model):
            print(f"{model}: {', '.join(f'{name} {value}' for name, value in row.items())}", flush=True)
            rows.append(row)
            recording.add(model, {"rows": rows, "complete": False})
        recording.add(model, {"rows": rows, "complete": True})
