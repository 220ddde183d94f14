"""A fake Triton driver for machines without a GPU. Run as a program, it prints which kernels were compiled in advance.

The compile pool compiles the kernels, and a second one finds them; a MetaWorker then rehearses all launches, which do
nothing. Each kernel is printed as "found" or "missed" in Triton's cache. Do not import it into pytest: Triton's driver
is process-global.
"""

import sys
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from proa_engine.config import EngineConfig
from proa_engine.kernels.launch import META_MULTIPROCESSORS
from proa_engine.worker.compile_pool import CompilePool, use_compile_cache
from proa_engine.worker.known_kernels import GpuKind
from proa_engine.worker.meta_worker import MetaWorker

GPU = GpuKind(90, 78)  # an H20, whose tilings are not those of an H200
MAX_PROGRAMS = 2**31  # Triton multiplies the grid's sizes as 32-bit integers


class FakeLauncher:
    def __init__(self, source: Any, metadata: Any) -> None:
        launcher = None
        self.launch = lambda: launcher  # Triton's of a kernel with tensor maps, which encodes them first

    def __call__(self, x: int, y: int, z: int, *arguments: object) -> None:
        assert 0 < x * y * z < MAX_PROGRAMS
        assert max(y, z) < 2**16


class FakeUtils:
    """A Hopper GPU that accepts every binary."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, binary: bytes, shared_memory: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def fill_tma_descriptor(self, *arguments: object) -> object:
        return arguments

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name since Triton 3.7


class FakeGpu:
    utils = FakeUtils()
    launcher_cls = FakeLauncher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", GPU.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(model: str, cache: str) -> None:
    config = EngineConfig(model=model, dtype="bfloat16", max_num_batched_tokens=16, max_num_seqs=4, compile_cache=cache)
    use_compile_cache(config)
    for _start in range(2):
        pool = CompilePool(config)
        pool.compile(GPU)
        print(pool.wait())

    def note(*, metadata: dict[str, Any], cache_hit: bool, **_: object) -> None:
        print("found" if cache_hit else "missed", metadata["name"])

    knobs.compilation.listener = note
    triton.runtime.driver.set_active(FakeGpu())
    META_MULTIPROCESSORS.set(GPU.multiprocessors)
    MetaWorker(config).run_start()


if __name__ == "__main__":
    main(*sys.argv[1:])
