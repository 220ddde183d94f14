"""Tensor maps: what a kernel needs to have a matrix copied by Hopper's tensor memory accelerator.

Triton encodes a map in C at each launch, from a descriptor, and expands it in Python to several arguments: 5 µs for
two maps. Here both are done once for each map.
"""

from copy import copy
from inspect import getclosurevars
from typing import Any, NamedTuple

import torch
from triton.backends.nvidia.driver import make_tensordesc_arg


class Memory(NamedTuple):
    """What a descriptor describes. A tensor in its place would live as long as the descriptor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class TensorMap:
    """An argument of a `Kernel`."""

    __slots__ = ("descriptor", "kind", "values")

    def __init__(self, descriptor: Any) -> None:
        """`descriptor`: Gluon's `TensorDescriptor`."""
        self.descriptor = descriptor
        self.kind = descriptor.base.dtype, tuple(descriptor.block_shape), descriptor.layout  # that a variant holds for
        self.values: list[object] = []  # arguments of the C launcher; none before the first launch


def encode(maps: list[TensorMap], compiled: Any) -> None:
    """Set the maps' `values`, which are arguments of this CompiledKernel."""
    for tensor_map, metadata in zip(maps, compiled.metadata.tensordesc_meta, strict=True):
        tensor_map.values = make_tensordesc_arg(tensor_map.descriptor, metadata)


def launcher_of_values(launcher: Any) -> Any:
    """A CompiledKernel's launcher that takes `values` in place of descriptors."""
    direct = copy(launcher)
    direct.launch = getclosurevars(launcher.launch).nonlocals["launcher"]
    return direct
