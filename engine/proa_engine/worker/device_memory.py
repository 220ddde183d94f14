"""Where a GPU's memory goes: measured before the KV cache gets what is left; and what is said when it runs out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from proa_engine.worker.decode_graphs import CudaRecorder, Recorder


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes of one GPU."""

    total: int
    weights: int
    step: int  # that the largest step takes at its peak
    graphs: int
    other: int  # CUDA, its libraries, other processes
    untouched: int  # what gpu_memory_utilization leaves alone

    @property
    def left(self) -> int:
        """For the KV cache. May be negative: nothing is left."""
        return self.total - self.weights - self.step - self.graphs - self.other - self.untouched

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "the largest step": self.step,
            "CUDA graphs": self.graphs,
            "libraries and others": self.other,
            "left alone": self.untouched,
            "for the KV cache": self.left,
        }
        sizes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        return f"GPU memory {self.total / 2**30:.2f} GiB: {sizes}"


class MeasuringRecorder:
    """Records, and notes how much memory is free before the first recording and after each."""

    def __init__(self, recorder: Recorder, free_bytes: Callable[[], int]) -> None:
        self._recorder = recorder
        self._free_bytes = free_bytes
        self._free = [free_bytes()]

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        recorded = self._recorder.record(work)
        self._free.append(self._free_bytes())
        return recorded

    def estimate(self, num_graphs: int) -> int:
        """Bytes of that many: the first, which is the largest, brings the memory that the others share."""
        first, *others = [before - after for before, after in zip(self._free, self._free[1:], strict=False)]
        return first + (num_graphs - 1) * max(others, default=0)


def measure_memory(
    run_largest_steps: Callable[[], object],
    record_largest_graphs: Callable[[Recorder], object] | None,
    *,
    num_graphs: int,
    utilization: float,
) -> MemoryAccount:
    """Do both and see what they take. What is allocated before is taken for the weights, and for good."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_reserved()
    run_largest_steps()
    step = torch.cuda.max_memory_reserved() - weights
    graphs = 0
    if record_largest_graphs is not None:
        recorder = MeasuringRecorder(CudaRecorder(), lambda: torch.cuda.mem_get_info()[0])
        record_largest_graphs(recorder)
        graphs = recorder.estimate(num_graphs)
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    untouched = int(total * (1 - utilization))
    return MemoryAccount(total, weights, step, graphs, total - free - reserved, untouched)


@contextmanager
def told_when_too_little() -> Iterator[None]:
    """Memory of the GPU that runs out becomes a `ValueError` that says what to change; other errors stay."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
        raise ValueError(
            f"the model does not fit into GPU memory: {free:.2f} GiB of {total:.2f} are left, and more is needed: "
            "quantize its weights (quantization), share it among more GPUs (tensor_parallel_size) or take a smaller "
            "model; if the weights fit, lower max_num_batched_tokens, max_num_seqs or the size of the KV cache"
        ) from error
