"""Join the ranks of an engine: the process group of all, each pipeline stage's, and the memory that its GPUs share."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch._C._distributed_c10d import Store

from proa_engine.config import EngineConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.ranks import distributed, symmetric_memory
from proa_engine.ranks.stage_links import StageLinks, join_stages


def join_ranks(
    config: EngineConfig,
    rendezvous: distributed.Rendezvous,
    store: Store | None,
    device: torch.device,
    log: Callable[[str], None],
) -> tuple[ParallelContext, StageLinks]:
    """Return the ranks of this rank's pipeline stage, and its links to other stages.

    Blocks until all ranks have joined. Rank 0 passes the store that it opened. Call `distributed.leave` at the end.
    """
    world = distributed.join(rendezvous, device, store)
    parallel, links = join_stages(world, config.parallel.pipeline_parallel_size)
    if parallel.group is None or device.type != "cuda" or config.parallel.disable_custom_all_reduce:
        return parallel, links
    size = config.parallel.tensor_parallel_size
    devices = symmetric_memory.devices_of_stage(rendezvous.rank // size, size, config.parallel.ranks_here)
    if size == 1 or devices is None:
        return parallel, links
    symmetric = symmetric_memory.open_all_reduce(parallel.group, device, devices, log)
    return replace(parallel, symmetric=symmetric), links
