"""Processes of GPU ranks that add tensors through symmetric memory and check the sums."""

import multiprocessing
import os
from pathlib import Path

import torch
import torch.distributed as dist

from proa_engine.ranks.symmetric_memory import open_all_reduce
from proa_engine.step.decode_graphs import CudaGraphCapture

SIZES = (8, 8 * 1024, 64 * 1024, 256 * 1024)  # elements: some of each kernel, and some that NCCL adds
NUM_REPLAYS = 20


def check_rank(rank: int, num_ranks: int, meeting: Path) -> None:
    """Check, eagerly and captured, that every rank gets the sum of the parts in the order of the ranks."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    assert group is not None
    lines: list[str] = []
    opened = open_all_reduce(group, device, range(num_ranks), lines.append)
    assert opened is not None, lines
    for dtype in (torch.bfloat16, torch.float32):
        for size in SIZES:
            generator = torch.Generator(device).manual_seed(size)
            parts = torch.randn(num_ranks, size, generator=generator, device=device).to(dtype)
            if parts[0].nbytes > opened.limits.one_shot:
                parts.round_()  # multimem adds in an order of its own
            expected = parts[0].clone()
            for part in parts[1:]:
                expected += part
            total = opened.all_reduce(parts[rank].clone())
            if total is None:
                assert parts[0].nbytes > opened.limits.multimem
                continue
            assert torch.equal(total, expected), (dtype, size)
            x = parts[rank].clone()

            def work(x: torch.Tensor = x) -> torch.Tensor:
                result = opened.all_reduce(x.clone())
                assert result is not None
                return result

            (graph,) = CudaGraphCapture().capture(work)
            for _ in range(NUM_REPLAYS):
                x.neg_()  # what the replay before left would be wrong
                graph.replay()
                assert torch.equal(graph.result, expected.neg_()), (dtype, size)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def check_all_ranks(num_ranks: int, meeting: Path, timeout: float) -> None:
    """Run `check_rank` in a process for each rank. Raises AssertionError if one fails within `timeout` seconds."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=check_rank, args=(rank, num_ranks, meeting)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout)
        assert [process.exitcode for process in processes] == [0] * num_ranks
    finally:
        for process in processes:
            process.kill()
