"""CompilePool: compile the first steps' kernels in other processes while the weights load.

Compiling a model's kernels one after another takes most of a minute. The processes (`compile_kernels`) compile them
into Triton's cache on disk, where the worker finds them. Torch is imported only to look for a GPU, so that the engine
and the first of the processes import it at the same time.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from proa_engine.config import EngineConfig
from proa_engine.memory.host import available_cores
from proa_engine.ranks.spawn import PARENT_VARIABLE
from proa_engine.worker.known_kernels import GpuKind, KnownKernels

_CACHE_VARIABLE = "TRITON_CACHE_DIR"
_PROGRAM = "proa_engine.worker.compile_kernels"
_DRIVER = Path("/proc/driver/nvidia/version")
_MAX_PROCESSES = 16  # with more, imports would take longer than compiling
_MAX_SECONDS = 180.0  # several times what one process takes
_GRACE_SECONDS = 5.0  # time for the processes to end by themselves

_log = logging.getLogger(__name__)


def use_compile_cache(config: EngineConfig) -> None:
    """Let this process and those that it starts keep the kernels that they compile in the configuration's folder.

    Triton finds an entry by a hash of the kernel's source with its constants and argument types, the GPU's
    architecture, and the versions of Triton and of ptxas, and writes it by renaming a file: processes and machines may
    share the folder. Entries contain absolute paths, so that at another path they are not found.
    """
    if config.compile_cache is not None:
        os.environ[_CACHE_VARIABLE] = str(Path(config.compile_cache).absolute())


class CompilePool:
    """Starts the program when it is constructed, unless an earlier start has left the list of its kernels. The program
    imports what it needs, then waits for `compile` or `close`.

    Its processes end after `max_seconds`, and with the thread that started the program.
    """

    def __init__(self, config: EngineConfig, max_seconds: float = _MAX_SECONDS) -> None:
        self._started = time.monotonic()
        self._max_seconds = max_seconds
        self._config = config
        self._known = KnownKernels(config)
        self._gpu = GpuKind(0, 0)  # set by `compile`
        self._num_known: int | None = None  # set by `compile`; None: the program compiles them
        self._process: subprocess.Popen[bytes] | None = None
        if not self._known.may_be_complete():
            self._process = self._start()

    def compile(self, gpu: GpuKind) -> None:
        """Compile for such GPUs. Nothing to do if all kernels are in the cache."""
        self._gpu = gpu
        self._num_known = self._known.count(gpu)
        if self._num_known is not None:
            self.close()
            return
        if self._process is None:
            self._process = self._start()
        _send(self._process, f"{gpu.capability} {gpu.multiprocessors}".encode())

    def close(self) -> None:
        """End the program, if it runs. May be called after `wait` and twice."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def wait(self) -> str:
        """Wait until all kernels are compiled, at most `max_seconds` from the start. Returns a log line.

        A failure is not fatal: kernels that were not compiled here are compiled on first launch.
        """
        if self._num_known is not None:
            return _describe(0, self._num_known, 0.0)
        assert self._process is not None, "call compile first"
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
            lines = (line.split() for line in output.decode(errors="replace").splitlines())
            kernels = [words for words in lines if len(words) == 2 and words[1] in ("0", "1")]  # others are Triton's
            self._known.remember(self._gpu, [entry for entry, _ in kernels])
            num_compiled = sum(was_there == "0" for _, was_there in kernels)
            return _describe(num_compiled, len(kernels), time.monotonic() - self._started)
        if self._process.returncode < 0:
            name = signal.Signals(-self._process.returncode).name
            reason = f"the program was ended by {name}, its limit is {self._max_seconds:g} s"
        else:
            reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return f"kernel precompilation failed, kernels will be compiled on first launch: {reason}"

    def note(self, kernel: str, _entry: str, was_there: bool) -> None:
        """Take what `on_kernel` tells of the worker: if it compiles a kernel, the list lacks it, and is deleted."""
        if not was_there:
            _log.info("kernel %s was not compiled in advance", kernel)
            self._known.forget(self._gpu)

    def _start(self) -> "subprocess.Popen[bytes]":
        num_processes = max(1, min(available_cores(), _MAX_PROCESSES))
        process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(num_processes), str(self._max_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                PARENT_VARIABLE: str(os.getpid()),
            },
        )
        _send(process, msgspec.json.encode(self._config))
        return process


def _describe(num_compiled: int, num_kernels: int, seconds: float) -> str:
    num_found = num_kernels - num_compiled
    return f"compiled {num_compiled} kernels in {seconds:.1f} s, {num_found} of {num_kernels} were in the cache"


def _send(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # the program has ended; `CompilePool.wait` says why
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def begin_compile_pool(config: EngineConfig) -> CompilePool | None:
    """Start the pool of rank 0 before torch is imported. None if this machine seems to have no NVIDIA GPU."""
    return None if config.device == "cpu" or not _DRIVER.exists() else CompilePool(config)


def start_compile_pool(config: EngineConfig, rank: int, begun: CompilePool | None = None) -> CompilePool | None:
    """Let this rank's pool compile for its GPU: `begun`, or a new one. None on a CPU, and for ranks that share a disk
    with one whose pool compiles for them."""
    import torch

    from proa_engine.memory.auto_config import resolve_device

    device = resolve_device(config.device, rank % config.parallel.ranks_per_node)
    if device.type != "cuda" or rank % config.parallel.ranks_here:
        if begun is not None:
            begun.close()
        return None
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    pool = begun or CompilePool(config)
    pool.compile(GpuKind(10 * properties.major + properties.minor, properties.multi_processor_count))
    return pool
