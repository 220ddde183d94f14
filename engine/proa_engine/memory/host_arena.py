"""HostArena: one rank's pages and state slots in host memory, and the copies between them and the device.

The copies of step N run between the end of step N - 1 and the start of step N + 1. On a CPU they run before step N, on
the thread of the steps. On CUDA they run beside it, on a stream of their own: that waits for step N - 1, and step N + 1
waits for it. The host waits for neither.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from proa_engine.core.types import Copies
from proa_engine.memory.arena_memory import ArenaMemory
from proa_engine.memory.cache_plan import CacheMemory
from proa_engine.mover.layout import SERIAL_BYTES, ArenaLayout

_MEASURED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Copied:
    """The stream of copies, and the event at their end."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event


def arena_layout(
    on_device: CacheMemory, num_pages: int, num_states: int, *, tail_columns: tuple[int, ...], has_directory: bool
) -> ArenaLayout:
    """Return the layout of pages and slots of the sizes in `on_device`, whose blocks must be in one tensor."""
    return ArenaLayout(
        num_pages=num_pages,
        page_bytes=on_device.blocks[0].nbytes,
        num_states=num_states,
        state_bytes=tuple(part[0].nbytes for part in on_device.states),
        has_directory=has_directory,
        tail_columns=tail_columns,
    )


class HostArena:
    """Pages and state slots in host memory. They live as long as the worker; `begin_step` gets the device's memory,
    which `sleep` frees and `wake_up` allocates anew.

    The mover maps `memory` too; it also needs serials and `on_copied`.
    """

    def __init__(
        self,
        on_device: CacheMemory,
        memory: ArenaMemory,
        on_copied: Callable[[Copies], None] | None = None,
    ) -> None:
        """Map `memory`, whose layout is for the pages and slots of `on_device`.

        `on_copied` is called, from any thread and in order, when a step's copies are complete.
        """
        self.memory = memory
        self._layout = layout = memory.layout
        arena = _host_memory(memory.descriptor, layout.num_bytes, is_pinned=on_device.blocks.is_cuda)
        self._serials = arena[: layout.num_units * SERIAL_BYTES].view(torch.int64).numpy()
        self._pages = _rows(arena, layout.pages_offset, layout.num_pages, on_device.blocks)
        self._states = [
            _rows(arena, offset, layout.num_states, part)
            for offset, part in zip(layout.states_offsets, on_device.states, strict=True)
        ]
        self._on_copied = on_copied
        self._copied = _Copied(torch.cuda.Stream(), torch.cuda.Event()) if on_device.blocks.is_cuda else None
        self._unreported: SimpleQueue[tuple[torch.cuda.Event, Copies] | None] = SimpleQueue()
        if self._copied is not None and on_copied is not None:
            Thread(target=self._report, name="proa-copied", daemon=True).start()

    def measure_load_rate(self, on_device: CacheMemory) -> float:
        """Return how many bytes a second are loaded while nothing else runs.

        Overwrites blocks of the device, so it must be called before the first step.
        """
        page_bytes = self._layout.page_bytes
        count = min(max(_MEASURED_BYTES // page_bytes, 1), len(self._pages), len(on_device.blocks))
        pairs = [(page, count - 1 - page) for page in range(count)]  # one by one, as scattered pages are
        seconds = min(self._time_load(pairs, on_device.blocks) for _ in range(3))  # the first time touches the memory
        return count * page_bytes / seconds

    def begin_step(self, copies: Copies, memory: CacheMemory) -> None:
        """Start the step's copies, as device work before the step's own; wait for those of the step before."""
        self._serials[[page for _, page in copies.stores]] = copies.serial
        self._serials[[self._layout.num_pages + slot for _, slot in copies.state_stores]] = copies.serial
        if self._copied is None:
            self._copy(copies, memory)
            if copies and self._on_copied is not None:
                self._on_copied(copies)
            return
        steps = torch.cuda.current_stream()
        steps.wait_event(self._copied.event)
        if copies:
            self._copied.stream.wait_stream(steps)
            with torch.cuda.stream(self._copied.stream):
                self._copy(copies, memory)
                self._copied.event.record()
                if self._on_copied is not None:
                    done = torch.cuda.Event()
                    done.record()
                    self._unreported.put((done, copies))

    def close(self) -> None:
        """Stop reporting copies, and close the memory."""
        self._unreported.put(None)
        self.memory.close()

    def _time_load(self, pairs: Sequence[tuple[int, int]], blocks: Tensor) -> float:
        if blocks.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        _copy(self._pages, blocks, pairs)
        if blocks.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def _report(self) -> None:
        """Wait for copies, which no other thread does."""
        assert self._on_copied is not None
        while (copied := self._unreported.get()) is not None:
            done, copies = copied
            done.synchronize()
            self._on_copied(copies)

    def _copy(self, copies: Copies, memory: CacheMemory) -> None:
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


def _host_memory(descriptor: int, num_bytes: int, *, is_pinned: bool) -> Tensor:
    """Return the memory of a file descriptor as bytes, page-locked for a GPU if `is_pinned`."""
    memory = torch.frombuffer(mmap(descriptor, num_bytes), dtype=torch.uint8)
    if is_pinned:
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error):
            raise ValueError(
                f"kv_offloading_size: {num_bytes / 2**30:.2f} GiB of host memory cannot be page-locked (CUDA error "
                f"{int(error)}): lower it, or raise the limit of locked memory"
            )
    return memory


def _rows(arena: Tensor, offset: int, count: int, on_device: Tensor) -> Tensor:
    """Return a view [count, ...] of the arena from `offset` on, for rows like those of `on_device`."""
    end = offset + count * on_device[0].nbytes
    return arena[offset:end].view(on_device.dtype).view(count, *on_device.shape[1:])
