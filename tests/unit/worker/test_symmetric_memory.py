"""All-reduces through symmetric memory: which kernel adds what, and that ranks which cannot use it agree on that."""

from collections.abc import Sequence
from datetime import timedelta
from typing import cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo

from proa_engine.layers.parallel import ParallelContext
from proa_engine.ranks import symmetric_memory
from proa_engine.ranks.symmetric_memory import Limits, SymmetricAllReduce, devices_of_stage, open_all_reduce

KIB = 1024
CPU = torch.device("cpu", 0)
LIMITS = Limits(one_shot=64, multimem=256)


class FakeKernels:
    """Adds the same numbers for every other rank. Notes which kernels ran."""

    def __init__(self, world_size: int = 4) -> None:
        self.world_size = world_size
        self.calls: list[str] = []

    def one_shot(self, buffer: Tensor, x: Tensor) -> Tensor:
        self.calls.append("one-shot")
        buffer.copy_(x)
        return buffer * self.world_size

    def multimem(self, buffer: Tensor) -> None:
        self.calls.append("multimem")
        buffer.mul_(self.world_size)


def all_reduce_of(kernels: FakeKernels, limits: Limits = LIMITS) -> SymmetricAllReduce:
    return SymmetricAllReduce(torch.zeros(256, dtype=torch.uint8), limits, kernels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_bytes", "kernel"), [(16, "one-shot"), (64, "one-shot"), (80, "multimem"), (256, "multimem")]
)
def test_few_bytes_are_added_by_one_shot_and_more_by_multimem(num_bytes: int, kernel: str, dtype: torch.dtype) -> None:
    kernels = FakeKernels()
    x = torch.arange(num_bytes // dtype.itemsize).to(dtype).view(2, -1)
    expected = x * 4
    total = all_reduce_of(kernels).all_reduce(x)
    assert total is not None
    assert torch.equal(total, expected)
    assert kernels.calls == [kernel]


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(68),  # too large
        torch.zeros(3),  # no multiple of the bytes that a thread loads
        torch.zeros(9)[1:],  # begins between two such
        torch.zeros(8, 4)[:, :2],  # not contiguous
        torch.zeros(8, dtype=torch.float16),
        torch.zeros(8, dtype=torch.int64),
    ],
)
def test_other_tensors_are_left_to_the_process_group(x: Tensor) -> None:
    kernels = FakeKernels()
    assert all_reduce_of(kernels).all_reduce(x) is None
    assert not kernels.calls


def test_without_multicast_or_among_few_ranks_multimem_is_not_used() -> None:
    assert Limits.of(8, has_multicast=True) == Limits(256 * KIB, 8192 * KIB)
    assert Limits.of(8, has_multicast=False) == Limits(256 * KIB, 0)
    assert Limits.of(2, has_multicast=True) == Limits(512 * KIB, 0)
    x = torch.zeros(32)
    assert all_reduce_of(FakeKernels(), Limits(64, 0)).all_reduce(x) is None


def test_a_context_with_symmetric_memory_uses_it_for_what_it_supports() -> None:
    kernels = FakeKernels(2)
    parallel = ParallelContext(0, 2, None, symmetric=all_reduce_of(kernels))
    assert parallel.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
    with mock.patch.object(dist, "all_reduce", lambda x, group: x.fill_(7)):
        assert parallel.all_reduce(torch.ones(3)).tolist() == [7.0] * 3
    assert kernels.calls == ["one-shot"]


@pytest.mark.parametrize(
    ("stage", "ranks_per_node", "devices"),
    [(0, 8, [0, 1, 2, 3]), (1, 8, [4, 5, 6, 7]), (1, 4, [0, 1, 2, 3]), (0, 2, None), (1, 6, None)],
)
def test_ranks_of_a_stage_share_memory_only_on_one_node(
    stage: int, ranks_per_node: int, devices: list[int] | None
) -> None:
    assert devices_of_stage(stage, 4, ranks_per_node) == devices


@pytest.fixture
def group() -> dist.ProcessGroup:
    """A group of this process alone, on the CPU."""
    gloo = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=60))
    return cast(dist.ProcessGroup, gloo)  # torch's stubs say that it is none


def open_with(
    group: dist.ProcessGroup, kernels: FakeKernels, devices: Sequence[int] = (0,)
) -> tuple[SymmetricAllReduce | None, list[str]]:
    log: list[str] = []

    def open_fake(*_: object) -> SymmetricAllReduce:
        return all_reduce_of(kernels)

    def sum_over_ranks(x: Tensor, op: object = None, group: dist.ProcessGroup | None = None) -> None:
        assert group is not None
        group.allreduce([x]).wait()

    with mock.patch.object(symmetric_memory, "_open", open_fake), mock.patch.object(dist, "all_reduce", sum_over_ranks):
        return open_all_reduce(group, CPU, devices, log.append), log


def test_symmetric_memory_is_used_if_its_sums_equal_the_groups(group: dist.ProcessGroup) -> None:
    kernels = FakeKernels(1)
    opened, log = open_with(group, kernels)
    assert opened is not None
    assert log == ["all-reduces of at most 0 KiB use symmetric memory"]
    assert kernels.calls == ["one-shot", "multimem"]


def test_wrong_sums_turn_symmetric_memory_off_with_the_reason(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    opened, log = open_with(group, FakeKernels(3))
    assert opened is None
    assert not log
    assert caplog.messages == ["all-reduces by NCCL alone: symmetric memory gives wrong sums"]


def test_gpus_without_access_to_each_other_turn_it_off_before_anything_is_opened(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = FakeKernels(1)
    with mock.patch.object(torch.cuda, "can_device_access_peer", return_value=False):
        opened, log = open_with(group, kernels, devices=[0, 1])
    assert opened is None
    assert not log
    assert caplog.messages == ["all-reduces by NCCL alone: GPU 0 cannot access the memory of GPU 1"]
    assert not kernels.calls
