"""CompilePool: processes that compile the first steps' kernels while the weights load.

One after another the kernels of a model take most of a minute. A process of its own rehearses the start of a worker,
notes the kernel variants that it launches, and forks: each child compiles its share into Triton's cache on disk, where
the worker finds them, and with them the C programs that launch them.

As a program: python -m proa_engine.worker.compile_pool CAPABILITY NUM_PROCESSES, the configuration on standard input.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from triton.backends.compiler import GPUTarget

from proa_engine.config import EngineConfig
from proa_engine.kernels.variants import Variant, compile_driver, compile_launcher, record
from proa_engine.worker.host import available_cores

_MOST_PROCESSES = 8  # more would rehearse longer than compile


class CompilePool:
    """Starts at once. `capability` is the GPU's: 90 for Hopper."""

    def __init__(self, config: EngineConfig, capability: int) -> None:
        self._started = time.monotonic()
        num_processes = max(1, min(available_cores(), _MOST_PROCESSES))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(capability), str(num_processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config))
        self._process.stdin.close()
        self._process.stdin = None  # `communicate` would write to it

    def wait(self) -> str:
        """Wait until all is compiled; returns a line on how it went.

        A failure is no reason to give up: what was not compiled here is compiled when it is launched.
        """
        output, errors = self._process.communicate()
        if self._process.returncode:
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
            return f"kernels will be compiled when they are launched, for compiling them before failed: {reason}"
        return f"compiled {int(output)} kernels in {time.monotonic() - self._started:.1f} s"


def main(capability: int, num_processes: int) -> int:
    """Compile all variants and print their number; returns the exit code."""
    from proa_engine.worker.meta_worker import MetaWorker  # a worker, which starts one of these

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    target = GPUTarget("cuda", capability, 32)
    driver = _fork(compile_driver)
    variants = record(MetaWorker(config).rehearse, target)
    with_launchers = _has_succeeded(driver)  # else there is no driver to launch anything here
    children = [
        _fork(partial(_compile, variants[share::num_processes], target, with_launchers))
        for share in range(num_processes)
    ]
    succeeded = [_has_succeeded(child) for child in children]
    print(len(variants))
    return 0 if all(succeeded) else 1


def _compile(variants: Sequence[Variant], target: GPUTarget, with_launchers: bool) -> None:
    for variant in variants:
        kernel = variant.compile(target)
        if with_launchers:
            compile_launcher(kernel)


def _fork(work: Callable[[], object]) -> int:
    """The id of a child that does the work and leaves. Nothing here runs threads, so a child is whole."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _has_succeeded(child: int) -> bool:
    """Wait for it."""
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
