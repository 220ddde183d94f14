"""All-reduces of few bytes through torch's symmetric memory, for GPUs that read each other's memory directly.

The buffer of every rank is mapped into all of them. One kernel copies a rank's part to its buffer, and one adds the
ranks' parts: NCCL's latency is several times as long for the few rows of a decode. Both ways give the same bits on
every rank, as a rank either adds the parts in the order of the ranks (one-shot), or adds some elements and stores them
on all (multimem). They can be captured in CUDA graphs.

One-shot reads the parts of all ranks on every rank, so it suits few bytes. Multimem, where the NVLink switch adds (from
Hopper on), reads each element once. The limits are those of vLLM's kernels of the same kinds; they are not measured
with these.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_KIB = 1024
_ALIGNMENT = 16  # bytes that a thread loads at once
_DTYPES = (torch.bfloat16, torch.float32)
_MOST_RANKS = 8
_log = logging.getLogger(__name__)


class Kernels(Protocol):
    def one_shot(self, buffer: Tensor, x: Tensor) -> Tensor:
        """Copy x [...] into the rank's buffer [...] and return the sum over all ranks, a new tensor."""
        ...

    def multimem(self, buffer: Tensor) -> None:
        """Replace the rank's buffer [...] with the sum over all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The most bytes of an all-reduce by each kernel; one-shot is preferred."""

    one_shot: int
    multimem: int

    @classmethod
    def of(cls, world_size: int, *, has_multicast: bool) -> "Limits":
        one_shot = (512 if world_size <= 4 else 256) * _KIB
        return cls(one_shot, 8192 * _KIB if has_multicast and world_size >= 4 else 0)


class SymmetricAllReduce:
    """Sums tensors over all ranks. `buffer` [bytes] uint8 is this rank's symmetric memory, at least of the limits."""

    def __init__(self, buffer: Tensor, limits: Limits, kernels: Kernels) -> None:
        self.limits = limits
        self._buffer = buffer
        self._kernels = kernels

    def all_reduce(self, x: Tensor) -> Tensor | None:
        """Return the sum of x [...] over all ranks. None if `x` is too large, or of a type or layout that the kernels
        do not support; all ranks get the same answer for tensors of the same shape, type and layout."""
        offset = int(x.storage_offset()) * x.element_size()
        if x.dtype not in _DTYPES or not x.is_contiguous() or (x.nbytes | offset) % _ALIGNMENT:
            return None
        if x.nbytes <= self.limits.one_shot:
            return self._kernels.one_shot(self._part(x), x)
        if x.nbytes <= self.limits.multimem:
            part = self._part(x)
            part.copy_(x)
            self._kernels.multimem(part)
            return x.copy_(part)
        return None

    def _part(self, x: Tensor) -> Tensor:
        """Return the start of the buffer with the type and shape of `x`."""
        return self._buffer[: x.nbytes].view(x.dtype).view(x.shape)


class _TorchKernels:
    def __init__(self, group_name: str) -> None:
        self._group_name = group_name

    def one_shot(self, buffer: Tensor, x: Tensor) -> Tensor:
        # A kernel of its own copies. In `one_shot_all_reduce_copy` a block's first warp signals the other ranks without
        # waiting for the block's other warps, so that a rank may read what an earlier sum left.
        buffer.copy_(x)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._group_name)
        return total

    def multimem(self, buffer: Tensor) -> None:
        torch.ops.symm_mem.multimem_all_reduce_(buffer, "sum", self._group_name)


def devices_of_stage(stage: int, ranks_of_stage: int, ranks_per_node: int) -> list[int] | None:
    """Return the devices of a pipeline stage's ranks, in the order of the ranks. None if the stage has ranks on several
    nodes."""
    ranks = range(stage * ranks_of_stage, (stage + 1) * ranks_of_stage)
    if ranks[0] // ranks_per_node != ranks[-1] // ranks_per_node:
        return None
    return [rank % ranks_per_node for rank in ranks]


def open_all_reduce(
    group: dist.ProcessGroup, device: torch.device, devices: Sequence[int], log: Callable[[str], None]
) -> SymmetricAllReduce | None:
    """Open symmetric memory among the ranks of `group`, whose processes share a machine and have these devices, and
    check that its sums equal the group's. None if a rank cannot; the reason is logged.

    Every rank of the group must call this.
    """
    opened: list[SymmetricAllReduce] = []
    steps: list[Callable[[], object]] = [
        lambda: _check_devices(device, devices),
        lambda: opened.append(_open(group, device)),
        lambda: _check_sums(opened[0], group, device),
    ]
    for step in steps:  # all ranks take a step, or none: each is a collective
        reason = ""
        try:
            step()
        except RuntimeError as error:  # also torch's: memory cannot be mapped, a kernel cannot be launched
            reason = str(error)
        if not _all_agree(group, device, is_ok=not reason):
            if reason:  # of this rank; those of the others do not know it
                _log.warning("all-reduces by NCCL alone: %s", reason)
            else:
                log("all-reduces by NCCL alone: another rank cannot use symmetric memory")
            return None
    limits = opened[0].limits
    log(f"all-reduces of at most {max(limits.one_shot, limits.multimem) // _KIB} KiB use symmetric memory")
    return opened[0]


def _check_devices(device: torch.device, devices: Sequence[int]) -> None:
    """Raise RuntimeError if symmetric memory cannot be used among these devices."""
    if len(devices) > _MOST_RANKS:
        raise RuntimeError(f"symmetric memory is used by at most {_MOST_RANKS} ranks")
    for other in devices:
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            raise RuntimeError(f"GPU {device.index} cannot access the memory of GPU {other}")


def _open(group: dist.ProcessGroup, device: torch.device) -> SymmetricAllReduce:
    import torch.distributed._symmetric_memory as symmetric_memory  # most engines do without

    largest = Limits.of(group.size(), has_multicast=True)
    buffer = symmetric_memory.empty(max(largest.one_shot, largest.multimem), dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(buffer, group.group_name)
    limits = Limits.of(group.size(), has_multicast=handle.multicast_ptr != 0)
    return SymmetricAllReduce(buffer, limits, _TorchKernels(group.group_name))


def _check_sums(opened: SymmetricAllReduce, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise RuntimeError if sums of the limits' sizes differ from the group's: direct access is broken on some machines
    that claim to have it. The addends are small integers, so that the order of addition does not matter."""
    results = []
    for num_bytes in filter(None, (opened.limits.one_shot, opened.limits.multimem)):
        addends = torch.arange(num_bytes // 2, device=device).remainder(13).add(group.rank()).bfloat16()
        expected = addends.clone()
        dist.all_reduce(expected, group=group)
        total = opened.all_reduce(addends)
        results.append(total is not None and torch.equal(total, expected))
    if not all(results):
        raise RuntimeError("symmetric memory gives wrong sums")


def _all_agree(group: dist.ProcessGroup, device: torch.device, *, is_ok: bool) -> bool:
    agreed = torch.tensor([int(is_ok)], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())
