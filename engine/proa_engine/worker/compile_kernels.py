"""The program that CompilePool runs: compile the kernels that a worker's start launches.

    python -m proa_engine.worker.compile_kernels NUM_PROCESSES MAX_SECONDS < lines

The first line is the configuration as JSON. The second, which may come later, is the GPU's compute capability times 10;
the program ends if there is none.

Runs the starts of workers on meta tensors, records the kernel variants that it launches, and forks: each child compiles
its share of them, with the C programs that launch them, into Triton's cache on disk. SIGALRM ends all of them after
MAX_SECONDS.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

import msgspec
from triton.backends.compiler import GPUTarget

from proa_engine.config import EngineConfig
from proa_engine.kernels.variants import Variant, compile_driver, compile_launcher, on_cache_miss, record
from proa_engine.worker.meta_worker import run_starts


def main(num_processes: int, max_seconds: float) -> int:
    """Compile all variants. Print the number of those that were not in the cache, and of all. Returns the exit code."""
    signal.setitimer(signal.ITIMER_REAL, max_seconds)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    # Functions of meta tensors import it when they are first called, which takes a second: use the time of waiting.
    import_module("torch._dynamo")
    capability = sys.stdin.buffer.readline()
    if not capability:
        return 0
    target = GPUTarget("cuda", int(capability), 32)
    driver = _fork(compile_driver)
    variants = record(partial(run_starts, config), target)
    with_launchers = _has_succeeded(driver)  # launchers need the driver
    misses = os.pipe()  # a byte for each; it has room for thousands before it is read
    on_cache_miss(lambda: os.write(misses[1], b"."))
    children = [
        _fork(partial(_compile, variants[share::num_processes], target, with_launchers))
        for share in range(num_processes)
    ]
    succeeded = [_has_succeeded(child) for child in children]
    os.close(misses[1])
    with os.fdopen(misses[0], "rb") as bytes_of_misses:
        print(len(bytes_of_misses.read()), len(variants))
    return 0 if all(succeeded) else 1


def _compile(variants: Sequence[Variant], target: GPUTarget, with_launchers: bool) -> None:
    for variant in variants:
        kernel = variant.compile(target)
        if with_launchers:
            compile_launcher(kernel)


def _fork(work: Callable[[], object]) -> int:
    """Run `work` in a child process and return its id. This process has no threads, so forking is safe.

    A child does not inherit the parent's timer, so its own is set to the time that is left.
    """
    seconds_left, _ = signal.getitimer(signal.ITIMER_REAL)
    child = os.fork()
    if child:
        return child
    signal.setitimer(signal.ITIMER_REAL, seconds_left)
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _has_succeeded(child: int) -> bool:
    """Wait for the child to exit. Returns whether its exit code is 0."""
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
