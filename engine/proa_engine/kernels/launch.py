"""Kernel: a Triton kernel whose launches take little of the host's time.

Triton finds the compiled variant for a launch by binding, specializing and printing all arguments in Python, which
takes longer than many kernels run. A `Kernel` leaves that to Triton once for each key, and later calls the variant.

A variant holds for its constants, for the types of its arguments, and for what Triton specializes on: whether an
address or an integer is a multiple of 16, whether an integer is 1, and its width. The key determines all of these. It
has the values of integers, so those that change from step to step should be listed in `do_not_specialize`.
"""

from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver

from proa_engine.kernels.dependent_launch import INTERPRETED, dependent_launch

INT32_END = 1 << 31


class Kernel:
    """Launched with `kernel[grid](*arguments, **constants)`: arguments by position, constants and options by name.

    A kernel with the constant PDL is launched as a dependent kernel on GPUs that support it. The process must keep its
    Triton driver after the first launch. Hooks of Triton's launches are not called.
    """

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        self.jit = triton.jit(function, **options)
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
            else:
                self._launch_by_triton(grid, *arguments, **constants)
                return
        variant = self._variants.get(tuple(key))
        if variant is None:
            compiled = self._launch_by_triton(grid, *arguments, **constants)
            if compiled is not None:  # None: a hook prevented the launch
                self._variants[tuple(key)] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = variant
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = gpu.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *values, *self._constants)

    def _launch_by_triton(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
        """Returns a CompiledKernel."""
        return self.jit[grid](*arguments, **constants, **dependent_launch() if self._is_dependent else {})


def kernel(function: Callable[..., None] | None = None, **options: Any) -> Any:
    """Decorate a function as `triton.jit` does. For kernels that are launched, not for functions that kernels call."""
    return partial(kernel, **options) if function is None else Kernel(function, **options)
