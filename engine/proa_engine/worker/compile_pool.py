"""CompilePool: compile the first steps' kernels in other processes while the weights load.

Compiling a model's kernels one after another takes most of a minute. The processes (`compile_kernels`) compile them
into Triton's cache on disk, where the worker finds them. Torch is imported only to look for a GPU, so that the engine
and the first of the processes import it at the same time.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from proa_engine.config import EngineConfig
from proa_engine.worker.host import available_cores

_CACHE_VARIABLE = "TRITON_CACHE_DIR"
_PROGRAM = "proa_engine.worker.compile_kernels"
_DRIVER = Path("/proc/driver/nvidia/version")
_MAX_PROCESSES = 8  # with more, tracing would take longer than compiling
_MAX_SECONDS = 180.0  # several times what one process takes
_GRACE_SECONDS = 5.0  # time for the processes to end by themselves


def use_compile_cache(config: EngineConfig) -> None:
    """Let this process and those that it starts keep the kernels that they compile in the configuration's folder.

    Triton finds an entry by a hash of the kernel's source with its constants and argument types, the GPU's
    architecture, and the versions of Triton and of ptxas, and writes it by renaming a file: processes and machines may
    share the folder. Entries contain absolute paths, so that at another path they are not found.
    """
    if config.compile_cache is not None:
        os.environ[_CACHE_VARIABLE] = str(Path(config.compile_cache).absolute())


class CompilePool:
    """Starts the program when it is constructed. It imports what it needs, then waits for `compile` or `close`.

    Its processes end after `max_seconds`, even if this process has ended before.
    """

    def __init__(self, config: EngineConfig, max_seconds: float = _MAX_SECONDS) -> None:
        self._started = time.monotonic()
        self._max_seconds = max_seconds
        num_processes = max(1, min(available_cores(), _MAX_PROCESSES))
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(num_processes), str(max_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        self._send(msgspec.json.encode(config))

    def compile(self, capability: int) -> None:
        """Compile for GPUs of this compute capability times 10: 90 for Hopper."""
        self._send(str(capability).encode())

    def close(self) -> None:
        """End the program, if it runs. May be called after `wait` and twice."""
        self._process.kill()
        self._process.communicate()

    def wait(self) -> str:
        """Wait until all kernels are compiled, at most `max_seconds` from the start. Returns a log line.

        A failure is not fatal: kernels that were not compiled here are compiled on first launch.
        """
        left = self._started + self._max_seconds - time.monotonic()
        try:
            output, errors = self._process.communicate(timeout=max(left, 0.0) + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdout, self._process.stderr):
                assert pipe is not None
                pipe.close()
        if self._process.returncode == 0:
            num_compiled, num_kernels = map(int, output.split())
            seconds = time.monotonic() - self._started
            num_found = num_kernels - num_compiled
            return f"compiled {num_compiled} kernels in {seconds:.1f} s, {num_found} of {num_kernels} were in the cache"
        if self._process.returncode < 0:
            name = signal.Signals(-self._process.returncode).name
            reason = f"the program was ended by {name}, its limit is {self._max_seconds:g} s"
        else:
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"kernel precompilation failed, kernels will be compiled on first launch: {reason}"

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the program has ended; `wait` says why
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()


def begin_compile_pool(config: EngineConfig) -> CompilePool | None:
    """Start the pool of rank 0 before torch is imported. None if this machine seems to have no NVIDIA GPU."""
    return None if config.device == "cpu" or not _DRIVER.exists() else CompilePool(config)


def start_compile_pool(config: EngineConfig, rank: int, begun: CompilePool | None = None) -> CompilePool | None:
    """Let this rank's pool compile for its GPU: `begun`, or a new one. None on a CPU, and for ranks that share a disk
    with one whose pool compiles for them."""
    import torch

    from proa_engine.worker.auto_config import resolve_device

    device = resolve_device(config.device, rank % config.ranks_per_node)
    if device.type != "cuda" or rank % config.ranks_here:
        if begun is not None:
            begun.close()
        return None
    torch.cuda.set_device(device)
    major, minor = torch.cuda.get_device_capability(device)
    pool = begun or CompilePool(config)
    pool.compile(10 * major + minor)
    return pool
