"""Memory of a GPU: measure how much is used beside the KV cache, and explain an out-of-memory error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from proa_engine.step.decode_graphs import CudaGraphCapture, Graph, GraphCapture


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The use of one GPU's memory, in bytes."""

    total: int
    weights: int
    largest_step: int  # peak
    graphs: int
    encoded_images: int
    other: int  # CUDA context, libraries, other processes
    reserve: int  # what gpu_memory_utilization excludes

    @property
    def available(self) -> int:
        """Bytes left for the KV cache; negative if the other uses exceed the memory."""
        taken = self.weights + self.largest_step + self.graphs + self.encoded_images + self.other + self.reserve
        return self.total - taken

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "largest step": self.largest_step,
            "CUDA graphs": self.graphs,
            "encoded images": self.encoded_images,
            "libraries and other processes": self.other,
            "reserve": self.reserve,
            "available for the KV cache": self.available,
        }
        sizes = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        return f"GPU memory {self.total / 2**30:.2f} GiB: {sizes}"


class MeasuringCapture:
    """Captures graphs and measures the free memory before the first capture and after each; the graphs of one call
    count as one."""

    def __init__(self, inner: GraphCapture, free_bytes: Callable[[], int]) -> None:
        self._inner = inner
        self._free_bytes = free_bytes
        self._free = [free_bytes()]

    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        captured = self._inner.capture(first, *others)
        self._free.append(self._free_bytes())
        return captured

    def estimate(self, num_graphs: int) -> int:
        """Return the bytes that `num_graphs` graphs take: those that were captured, and others like the last. The
        largest graph of each kind allocates the memory that others share, so the last should not be one of these."""
        num_others = num_graphs - len(self._free) + 1
        return self._free[0] - self._free[-1] + num_others * (self._free[-2] - self._free[-1])


def measure_memory(
    run_largest_steps: Callable[[], object],
    capture_largest_graphs: Callable[[GraphCapture], object] | None,
    *,
    num_graphs: int,
    utilization: float,
    encoded_images: int,
) -> MemoryUsage:
    """Run both functions and measure the memory that they take. Memory allocated before counts as weights.
    `encoded_images` is the size of the encoded images that are kept between steps."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_reserved()
    run_largest_steps()
    largest_step = torch.cuda.max_memory_reserved() - weights
    graphs = 0
    if capture_largest_graphs is not None:
        capture = MeasuringCapture(CudaGraphCapture(), lambda: torch.cuda.mem_get_info()[0])
        capture_largest_graphs(capture)
        graphs = capture.estimate(num_graphs)
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    reserve = int(total * (1 - utilization))
    return MemoryUsage(total, weights, largest_step, graphs, encoded_images, total - free - reserved, reserve)


@contextmanager
def explain_out_of_memory() -> Iterator[None]:
    """Turn a GPU's out-of-memory error into a `ValueError` that names what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
        raise ValueError(
            f"the model does not fit into GPU memory: {free:.2f} GiB of {total:.2f} are left, and more is needed: "
            "quantize its weights (quantization), share it among more GPUs (tensor_parallel_size) or take a smaller "
            "model; if the weights fit, lower max_num_batched_tokens, max_num_seqs or the size of the KV cache"
        ) from error
