"""The GPUs that a process can use, asked of the driver without torch, and what an engine needs of them.

NVML is asked through its C library: three calls, which make no CUDA context. A context would cost memory, and processes
that are forked later, such as those that compile kernels, could not use it.
"""

import ctypes
import os
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DEVICE_ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True, slots=True)
class Gpus:
    """`memory`: bytes of each GPU that this process can use, at most, the largest first."""

    memory: tuple[int, ...]


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_gpus(environment: Mapping[str, str] = os.environ) -> Gpus | None:
    """The GPUs of this process; None if that cannot be known without CUDA: there is no NVML, or GPUs are divided (MIG),
    or `environment` names them by other than their numbers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        memory = [_read_memory(nvml, number) for number in range(_count(nvml))]
    finally:
        nvml.nvmlShutdown()
    numbers = visible(environment.get(VISIBLE_DEVICES), len(memory))
    if numbers is None:
        return None
    if any(memory[number] is None for number in numbers):
        return None
    # CUDA's first GPU is the fastest one, NVML's that with the lowest bus id: of unequal ones the largest are assumed.
    candidates = numbers if environment.get(DEVICE_ORDER) == "PCI_BUS_ID" else range(len(memory))
    sizes = (size for number in candidates if (size := memory[number]) is not None)
    return Gpus(tuple(sorted(sizes, reverse=True)[: len(numbers)]))


def visible(variable: str | None, count: int) -> Sequence[int] | None:
    """The numbers of the GPUs that CUDA_VISIBLE_DEVICES leaves of `count`, as CUDA reads it: those behind the first
    number that does not exist are not used. None if it names a GPU otherwise."""
    if variable is None:
        return range(count)
    numbers: list[int] = []
    for word in map(str.strip, variable.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            return None
        if not word.isdigit() or int(word) >= count:
            break
        numbers.append(int(word))
    return numbers


def check_gpus(device: str, num_ranks: int, gpus: Gpus | None) -> None:
    """Raise ValueError if `num_ranks` ranks are to run here on a GPU each, and there are fewer. `device`: the option.
    `gpus` None: not known."""
    if gpus is None or not _uses_gpus(device, gpus) or len(gpus.memory) >= num_ranks:
        return
    hint = f"; {VISIBLE_DEVICES} is {os.environ[VISIBLE_DEVICES]!r}" if VISIBLE_DEVICES in os.environ else ""
    raise ValueError(
        f"the engine needs {num_ranks} GPUs here, one for each rank, but this process has {len(gpus.memory)}{hint}: "
        "lower tensor_parallel_size, or give the container more GPUs"
    )


def check_torch(device: str) -> None:
    """Raise ValueError if torch is built for AMD's GPUs and the engine is to use them. `device`: the option."""
    spec = find_spec("torch")
    if device == "cpu" or spec is None or spec.origin is None:
        return
    torch_version = runpy.run_path(str(Path(spec.origin).with_name("version.py")))  # which imports nothing of torch
    if hip := torch_version.get("hip"):
        raise ValueError(
            f"torch {torch_version['__version__']} is built for AMD GPUs (ROCm {hip}), which are not supported: set "
            "device cpu, or install torch for CUDA on a machine with an NVIDIA GPU"
        )


def check_driver() -> None:
    """Raise ValueError if the machine has no NVIDIA driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ValueError(
            f"device cuda needs an NVIDIA driver, and there is none here ({error}); a container must be given the GPU"
        ) from error


def runs_on_cpu(device: str, gpus: Gpus | None) -> bool | None:
    """Whether an engine with this option computes on the CPU; None if only torch knows."""
    if device != "auto":
        return device == "cpu"
    if gpus is None and Path("/dev/nvidiactl").exists():
        return None
    return gpus is None or not _uses_gpus(device, gpus)


def _uses_gpus(device: str, gpus: Gpus) -> bool:
    return device == "cuda" or (device == "auto" and bool(gpus.memory) and not _torch_is_for_cpus())


def _torch_is_for_cpus() -> bool:
    return version("torch").endswith("+cpu")


def _count(nvml: ctypes.CDLL) -> int:
    count = ctypes.c_uint()
    return 0 if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value


def _read_memory(nvml: ctypes.CDLL, number: int) -> int | None:
    """Bytes of a GPU; None if it is divided, or NVML does not tell."""
    handle, memory = ctypes.c_void_p(), _Memory()
    is_divided, will_be_divided = ctypes.c_uint(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)):
        return None
    # An error: the GPU cannot be divided.
    if (
        not nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(is_divided), ctypes.byref(will_be_divided))
        and is_divided.value
    ):
        return None
    return None if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else memory.total
