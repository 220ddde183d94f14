"""Process group of the tensor-parallel ranks, over a TCPStore that rank 0 opens for each engine start.

All ranks share one machine (a pod), so everything uses the loopback interface.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from proa_engine.layers.parallel import ParallelContext

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(minutes=30)  # a rank may load its weights far slower than another


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which the ranks join. A generation is one start of the engine; its number is unique."""

    generation: int
    port: int
    rank: int
    world_size: int


def open_store(world_size: int) -> TCPStore:
    """Open rank 0's store on a free port (`store.port`)."""
    return TCPStore(_HOST, 0, world_size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


def join(rendezvous: Rendezvous, device: torch.device, store: Store | None = None) -> ParallelContext:
    """Join the process group. Blocks until all ranks have joined. Rank 0 passes the store that it opened."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if store is None:
        store = TCPStore(_HOST, rendezvous.port, rendezvous.world_size, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(str(rendezvous.generation), store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=_TIMEOUT,
    )
    return ParallelContext(rendezvous.rank, rendezvous.world_size, dist.group.WORLD)


def leave() -> None:
    """Leave the process group, without waiting for the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
