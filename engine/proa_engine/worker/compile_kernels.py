"""The program that CompilePool runs: compile the kernels that a worker's start launches.

    python -m proa_engine.worker.compile_kernels NUM_PROCESSES MAX_SECONDS < lines

The first line is the configuration as JSON. The second, which may come later, has the numbers of a `GpuKind`; the
program ends if there is none.

Runs the starts of workers on meta tensors, records the kernel variants that it launches, and forks: the children take
them from a queue and compile them, and then the C programs that launch them, into Triton's cache on disk. SIGALRM ends
all of them after MAX_SECONDS; before that, the children end with this program, and it with the thread that started it.
"""

import gc
import os
import signal
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from types import ModuleType
from typing import Any

import msgspec
import torch
from triton.backends.compiler import GPUTarget

from proa_engine.config import EngineConfig
from proa_engine.kernels.variants import Variant, compile_driver, compile_launcher, hash_triton, on_kernel, record
from proa_engine.ranks.spawn import exit_with, exit_with_parent
from proa_engine.worker.known_kernels import GpuKind
from proa_engine.worker.meta_worker import run_starts

_INDEX_BYTES = 2


def main(num_processes: int, max_seconds: float) -> int:
    """Compile all variants. Print a line for each: its folder in the cache, and 1 if it was there. Returns the exit
    code."""
    exit_with_parent()
    signal.setitimer(signal.ITIMER_REAL, max_seconds)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    gc.disable()  # it would find nothing to free in what is imported, and copy memory that children share
    driver = _fork(compile_driver)
    hashing = Thread(target=hash_triton)
    hashing.start()
    prepare_meta_tensors()
    hashing.join()  # before the next fork
    # All of the above is done while the worker imports torch and looks for the GPU.
    numbers = sys.stdin.buffer.readline().split()
    if not numbers:
        return 0
    gpu = GpuKind(*map(int, numbers))
    target = GPUTarget("cuda", gpu.capability, 32)
    variants = record(partial(run_starts, config), target, gpu.multiprocessors)
    queue, queue_end = os.pipe()  # of indices of variants; it has room for thousands
    os.write(queue_end, array("H", range(len(variants))).tobytes())
    os.close(queue_end)
    on_kernel(lambda _, entry, was_there: os.write(sys.stdout.fileno(), f"{entry} {was_there:d}\n".encode()))
    has_driver, has_driver_end = os.pipe()  # a byte for each child, none if the driver cannot be compiled
    children = [
        _fork(partial(_compile, variants, queue, target, has_driver, has_driver_end)) for _ in range(num_processes)
    ]
    if _has_succeeded(driver):
        os.write(has_driver_end, bytes(num_processes))
    os.close(has_driver_end)
    return 0 if all([_has_succeeded(child) for child in children]) else 1


def prepare_meta_tensors() -> None:
    """Import what functions of meta tensors import when they are first called, but for torch._dynamo, which takes a
    second of CPU time: torch finds nothing but `disable` in its place.

    They import it to have it ignore them (`torch/_compile.py`), and nothing is compiled by it here.
    """

    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        return function

    dynamo = ModuleType("torch._dynamo")
    dynamo.disable = disable  # type: ignore[attr-defined]
    sys.modules[dynamo.__name__] = dynamo
    torch.cat([torch.empty(1, device="meta")] * 2)  # imports sympy, half a second


def _compile(variants: Sequence[Variant], queue: int, target: GPUTarget, has_driver: int, has_driver_end: int) -> None:
    """Compile variants until the queue is empty, then their launchers, which need the driver."""
    os.close(has_driver_end)
    kernels = []
    while index := os.read(queue, _INDEX_BYTES):
        kernels.append(variants[int.from_bytes(index, sys.byteorder)].compile(target))
    if os.read(has_driver, 1):
        for kernel in kernels:
            compile_launcher(kernel)


def _fork(work: Callable[[], object]) -> int:
    """Run `work` in a child process and return its id. This process has no threads, so forking is safe.

    A child does not inherit the parent's timer, so its own is set to the time that is left.
    """
    seconds_left, _ = signal.getitimer(signal.ITIMER_REAL)
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    signal.setitimer(signal.ITIMER_REAL, seconds_left)
    try:
        exit_with(parent)
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _has_succeeded(child: int) -> bool:
    """Wait for the child to exit. Returns whether its exit code is 0."""
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), float(sys.argv[2])))  # to free what torch has allocated takes half a second
