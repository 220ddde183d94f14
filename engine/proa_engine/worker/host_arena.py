"""HostArena: one rank's pages and state slots in host memory, and the copies between them and the device.

The copies of step N run between the end of step N - 1 and the start of step N + 1. On a CPU they run before step N, on
the thread of the steps. On CUDA they run beside it, on a stream of their own: that waits for step N - 1, and step N + 1
waits for it. The host waits for neither.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap

import torch
from torch import Tensor

from proa_engine.core.types import Copies
from proa_engine.worker.cache_plan import CacheMemory


@dataclass(frozen=True, slots=True)
class _Copied:
    """The stream of copies, and the event at their end."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event


class HostArena:
    """Pages and state slots in host memory. They live as long as the worker; `begin_step` gets the device's memory,
    which `sleep` frees and `wake_up` allocates anew."""

    def __init__(self, memory: CacheMemory, num_pages: int, num_states: int) -> None:
        """Allocate pages and slots of the sizes in `memory`, whose blocks must be in one tensor."""
        assert memory.blocks is not None
        self._pages, *self._states = (
            _host_tensor(each, count)
            for each, count in ((memory.blocks, num_pages), *((each, num_states) for each in memory.states))
        )
        self._copied = _Copied(torch.cuda.Stream(), torch.cuda.Event()) if memory.blocks.is_cuda else None

    def begin_step(self, copies: Copies, memory: CacheMemory) -> None:
        """Start the step's copies, as device work before the step's own; wait for those of the step before."""
        if self._copied is None:
            self._copy(copies, memory)
            return
        steps = torch.cuda.current_stream()
        steps.wait_event(self._copied.event)
        if copies:
            self._copied.stream.wait_stream(steps)
            with torch.cuda.stream(self._copied.stream):
                self._copy(copies, memory)
                self._copied.event.record()

    def _copy(self, copies: Copies, memory: CacheMemory) -> None:
        assert memory.blocks is not None
        _copy(memory.blocks, self._pages, copies.stores)
        _copy(self._pages, memory.blocks, copies.loads)
        for on_device, on_host in zip(memory.states, self._states, strict=True):
            _copy(on_device, on_host, copies.state_stores)
            _copy(on_host, on_device, copies.state_loads)


def _copy(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for first, to, count in _runs(pairs):
        target[to : to + count].copy_(source[first : first + count], non_blocking=True)


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Merge pairs of consecutive sources and targets. Yields the first source, the first target and their number."""
    start = 0
    for index in range(1, len(pairs) + 1):
        source, target = pairs[start]
        count = index - start
        if index == len(pairs) or pairs[index] != (source + count, target + count):
            yield source, target, count
            start = index


def _host_tensor(on_device: Tensor, count: int) -> Tensor:
    """Return a tensor [count, ...] in host memory for rows of `on_device`, page-locked for a GPU.

    Not from torch's allocator of pinned memory, which rounds sizes up to powers of two. On a CPU, pages that were never
    written take no memory.
    """
    num_bytes = count * on_device[0].nbytes
    memory = torch.frombuffer(mmap(-1, num_bytes), dtype=torch.uint8)
    if on_device.is_cuda:
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error):
            raise ValueError(
                f"kv_offloading_size: {num_bytes / 2**30:.2f} GiB of host memory cannot be page-locked (CUDA error "
                f"{int(error)}): lower it, or raise the limit of locked memory"
            )
    return memory.view(on_device.dtype).view(count, *on_device.shape[1:])
