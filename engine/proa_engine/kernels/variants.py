"""Which Triton kernels a piece of work launches, found by doing it on meta tensors: no GPU, no memory, no launch.

A variant is a kernel with the types and alignments of its arguments and its compile-time constants: what Triton
compiles once. Meta tensors have shapes, strides and offsets, so the launchers themselves say which variants they need,
and there is no second list to keep. Knows no model.

Triton's choice of GPU is the process's, so `record` and `compile` belong into a process of their own. `on_compilation`
tells of what they missed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

SM_90 = GPUTarget("cuda", 90, 32)  # Hopper


@dataclass(frozen=True, slots=True)
class Variant:
    specialization: str  # JSON, as Triton writes it

    @property
    def name(self) -> str:
        """The kernel's module and its own name."""
        return str(json.loads(self.specialization)["name"])

    def compile(self, target: GPUTarget = SM_90) -> Any:
        """Compile, or take it from Triton's cache on disk; returns a CompiledKernel."""
        triton.runtime.driver.set_active(_NamedGpu(target))
        module, _, kernel = self.name.rpartition(".")
        return getattr(import_module(module), kernel).preload(self.specialization)


def compile_driver() -> None:
    """Compile what Triton has in C to talk to a GPU, once and for all. Raises where CUDA's own library is missing."""
    CudaDriver()


def compile_launcher(kernel: Any) -> None:
    """Compile what launches a compiled kernel: before Triton 3.7 that is a program in C for each signature."""
    driver = CudaDriver()
    triton.runtime.driver.set_active(driver)
    driver.launcher_cls(kernel.src, kernel.metadata)


def record(work: Callable[[], object], target: GPUTarget = SM_90) -> list[Variant]:
    """The variants that `work` launches, each once, in order. Its tensors are meta tensors.

    Record first, then compile: Triton tells of a variant only until the process has compiled it.
    """
    variants: dict[Variant, None] = {}

    def note(*, compile: dict[str, Any], **_: object) -> bool:
        variants[Variant(compile["specialization_data"])] = None
        return True  # neither compile nor launch

    triton.runtime.driver.set_active(_NamedGpu(target))
    knobs.runtime.jit_cache_hook = note
    try:
        work()
    finally:
        knobs.runtime.jit_cache_hook = None
    return list(variants)


def on_compilation(tell: Callable[[str], None]) -> None:
    """From now on call `tell` with a kernel's name when this process compiles one, or takes it from Triton's cache."""

    def note(*, fn: Any, **_: object) -> None:
        tell(fn.name)

    knobs.runtime.jit_post_compile_hook = note


class _NamedGpu:
    """As much of a Triton driver as says what to compile for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
