"""Find the Triton kernel variants that some work launches by running it on meta tensors: no GPU, memory or launch.

A variant is a kernel with the types and alignments of its arguments and its compile-time constants: the unit that
Triton compiles. Meta tensors have shapes, strides and offsets, so the launchers themselves determine the variants and
no second list is needed.

Triton's target GPU is set for the whole process, so call `record` and `compile` in a process of their own.
`on_compilation` reports the variants that they missed.

Processes that import this module find each other's kernels in Triton's cache, in whichever order they compile them
(`_hash_with_callee`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.cache import triton_key
from triton.runtime.jit import DependenciesFinder

from proa_engine.kernels.launch import HOPPER_MULTIPROCESSORS, META_MULTIPROCESSORS

SM_90 = GPUTarget("cuda", 90, 32)  # Hopper

_update_hash = DependenciesFinder._update_hash


def _hash_with_callee(finder: Any, callee: Any) -> None:
    """Hash a called function before its caller takes over the names and values of its global constants.

    Those are a part of the caller's key in the cache. Triton 3.6 and 3.7 take over those that are known, which they are
    only if another kernel with the same function was hashed before, and then hash the function.
    """
    _ = callee.cache_key
    _update_hash(finder, callee)


DependenciesFinder._update_hash = _hash_with_callee


@dataclass(frozen=True, slots=True)
class Variant:
    specialization: str  # JSON, as Triton writes it

    @property
    def name(self) -> str:
        """The kernel's qualified name: module and function."""
        return str(json.loads(self.specialization)["name"])

    def compile(self, target: GPUTarget = SM_90) -> Any:
        """Compile the variant, or load it from Triton's cache on disk; returns a CompiledKernel."""
        triton.runtime.driver.set_active(_NamedGpu(target))
        module, _, kernel = self.name.rpartition(".")
        return getattr(import_module(module), kernel).jit.preload(self.specialization)


def compile_driver() -> None:
    """Compile the C extension with which Triton calls the CUDA driver. Raises if libcuda is missing."""
    CudaDriver()


def compile_launcher(kernel: Any) -> None:
    """Compile the launcher of a compiled kernel: before Triton 3.7 a C extension for each signature."""
    driver = CudaDriver()
    triton.runtime.driver.set_active(driver)
    driver.launcher_cls(kernel.src, kernel.metadata)


def hash_triton() -> None:
    """Compute what each kernel's key in Triton's cache begins with, once in a process and its later children: a hash of
    Triton's files, half a gigabyte. It takes 0.3 s of CPU time, most of it without the interpreter lock."""
    triton_key()


def record(
    work: Callable[[], object], target: GPUTarget = SM_90, multiprocessors: int = HOPPER_MULTIPROCESSORS
) -> list[Variant]:
    """Return the variants that `work` launches on meta tensors, each once, in order, for GPUs with so many
    multiprocessors.

    Call it before `compile`: Triton reports a variant only if the process has not compiled it yet.
    """
    variants: dict[Variant, None] = {}

    def note(*, compile: dict[str, Any], **_: object) -> bool:
        variants[Variant(compile["specialization_data"])] = None
        return True  # neither compile nor launch

    triton.runtime.driver.set_active(_NamedGpu(target))
    knobs.runtime.jit_cache_hook = note
    tiled_for = META_MULTIPROCESSORS.set(multiprocessors)
    try:
        work()
    finally:
        META_MULTIPROCESSORS.reset(tiled_for)
        knobs.runtime.jit_cache_hook = None
    return list(variants)


def on_compilation(tell: Callable[[str], None]) -> None:
    """Call `tell` with a kernel's name each time this process compiles one or loads it from Triton's cache."""

    def note(*, fn: Any, **_: object) -> None:
        tell(fn.name)

    knobs.runtime.jit_post_compile_hook = note


def on_kernel(tell: Callable[[str, str, bool], object]) -> None:
    """Call `tell` each time this process, or a child that it forks, has compiled a kernel or loaded one from Triton's
    cache on disk: with the names of the kernel and of its folder in the cache, and whether it was there."""

    def note(*, metadata: dict[str, Any], metadata_group: dict[str, str], cache_hit: bool, **_: object) -> None:
        tell(metadata["name"], Path(next(iter(metadata_group.values()))).parent.name, cache_hit)

    knobs.compilation.listener = note


class _NamedGpu:
    """A Triton driver that only names its target."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
