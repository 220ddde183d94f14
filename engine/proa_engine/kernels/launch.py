"""Kernel: a Triton kernel whose launches take little of the host's time.

Triton finds the compiled variant for a launch by binding, specializing and printing all arguments in Python, which
takes longer than many kernels run. A `Kernel` leaves that to Triton once for each key, and later calls the variant.

A variant holds for its constants, for the types of its arguments, and for what Triton specializes on: whether an
address or an integer is a multiple of 16, whether an integer is 1, and its width. The key determines all of these. It
has the values of integers, so those that change from step to step should be listed in `do_not_specialize`.

Programmatic dependent launch (CUDA, Hopper and later): a kernel starts while the previous kernel ends.

A kernel with the constant PDL calls `begin`, or begins with `gdc_launch_dependents` if that is set: once all of its
programs have started, the next kernel's programs may start on free multiprocessors, load what no kernel writes
(weights), and wait. `gdc_wait` returns when the previous kernel has ended and its writes are visible. Every program
must call it before it reads or writes memory that the step's kernels write, and must call it even if it does neither,
because the next kernel takes this kernel's end as the end of all earlier ones. Ordinary kernels wait for these kernels,
and these for them.

PROA_DEPENDENT_LAUNCH=0 in the environment turns it off, in all processes of an engine: to find out whether a hang or a
wrong result comes from it.
"""

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from types import NoneType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from proa_engine.kernels.tensor_map import TensorMap, encode, launcher_of_values

HOPPER_MULTIPROCESSORS = 132
META_MULTIPROCESSORS = ContextVar("META_MULTIPROCESSORS", default=HOPPER_MULTIPROCESSORS)  # see `variants.record`

FIRST_CAPABILITY = 90
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # tests: kernels compute on CPU tensors too
_IS_OFF = os.environ.get("PROA_DEPENDENT_LAUNCH") == "0"

INT32_END = 1 << 31


def cdiv(n: int, d: int) -> int:
    """n / d, rounded up; d > 0"""
    return -(-n // d)


def next_power_of_2(n: int) -> int:
    """The smallest power of two of at least n; n > 0"""
    return 1 << (n - 1).bit_length()


def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # meta tensors or the interpreter
        return META_MULTIPROCESSORS.get()
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capability(device: torch.device) -> int:
    """The GPU's compute capability times 10: 90 for Hopper."""
    if device.type != "cuda":  # meta tensors
        return int(driver.active.get_current_target().arch)
    return _gpu_capability(device)


@cache
def _gpu_capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_hopper(device: torch.device) -> bool:
    """Whether kernels may use the tensor cores' instructions that no GPU before or after Hopper has."""
    return not INTERPRETED and capability(device) == FIRST_CAPABILITY


@triton.jit
def begin(PDL: tl.constexpr):
    """The first line of a kernel that loads nothing before the previous kernel has ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def dependent_launch() -> dict[str, Any]:
    """Return what the launch of a kernel with the constant PDL needs: the constant and Triton's option."""
    if INTERPRETED or _IS_OFF or driver.active.get_current_target().arch < FIRST_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


class Kernel:
    """Launched with `kernel[grid](*arguments, **constants)`: arguments by position, constants and options by name.

    A kernel with the constant PDL is launched as a dependent kernel on GPUs that support it. The process must keep its
    Triton driver after the first launch. Hooks of Triton's launches are not called.
    """

    def __init__(self, function: Callable[..., None], *, jit: Callable[..., Any] = triton.jit, **options: Any) -> None:
        """`jit`: `gluon.jit` for a kernel in Gluon. `options`: its options."""
        self.jit = jit(function, **options)
        self._is_dependent = "PDL" in self.jit.arg_names
        self._variants: dict[tuple[object, ...], tuple[Callable[..., None], Any, Any]] = {}
        if INTERPRETED:
            return
        arguments = [param for param in self.jit.params if not param.is_constexpr]
        assert arguments == self.jit.params[: len(arguments)], "constants must come last"
        assert not any(param.annotation for param in arguments), "arguments must have no annotations"
        self._any_value = [param.do_not_specialize for param in arguments]
        self._any_address = [param.do_not_specialize or param.do_not_specialize_on_alignment for param in arguments]
        self._constants = [None] * (len(self.jit.params) - len(arguments))  # a variant ignores their values

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch_by_triton if INTERPRETED else self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        gpu = driver.active
        device = gpu.get_current_device()
        key: list[object] = [device, *constants, *constants.values()]
        values: list[object] = []
        maps: list[TensorMap] = []
        free = zip(arguments, self._any_value, self._any_address, strict=True)
        for argument, any_value, any_address in free:
            kind = type(argument)
            if kind is Tensor:
                address = argument.data_ptr()
                values.append(address)
                key.append(argument.dtype if any_address or address % 16 == 0 else (argument.dtype,))
            elif kind is int:
                values.append(argument)
                key.append(int if any_value and -INT32_END <= argument < INT32_END else argument)
            elif kind is float or kind is NoneType:
                values.append(argument)
                key.append(kind)
            elif kind is TensorMap:
                maps.append(argument)
                values += argument.values
                key.append(argument.kind)
            else:
                self._launch_by_triton(grid, *arguments, **constants)
                return
        variant = self._variants.get(tuple(key))
        if variant is None or not all(tensor_map.values for tensor_map in maps):
            compiled = self._launch_by_triton(grid, *arguments, **constants)
            if compiled is not None:  # None: a hook prevented the launch
                encode(maps, compiled)
                run = launcher_of_values(compiled.run) if maps else compiled.run
                self._variants[tuple(key)] = run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = variant
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = gpu.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *values, *self._constants)

    def _launch_by_triton(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
        """Returns a CompiledKernel."""
        given = [argument.descriptor if type(argument) is TensorMap else argument for argument in arguments]
        return self.jit[grid](*given, **constants, **dependent_launch() if self._is_dependent else {})


def kernel(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """Decorate a function as `triton.jit` does. For kernels that are launched, not for functions that kernels call."""
    return partial(kernel, **options) if function is None else Kernel(function, **options)
