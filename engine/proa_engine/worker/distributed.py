"""How tensor-parallel ranks meet: a store that rank 0 opens anew for every generation, and a process group over it.

All ranks share one machine (a pod), so everything stays on the loopback interface.
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
    """Where the ranks of one generation meet. A generation is one life of the engine; its number never comes back."""

    generation: int
    port: int
    rank: int
    world_size: int


def open_store(world_size: int) -> TCPStore:
    """Rank 0's side: the store, on a free port (`store.port`)."""
    return TCPStore(_HOST, 0, world_size, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


def join(rendezvous: Rendezvous, device: torch.device, store: Store | None = None) -> ParallelContext:
    """Meet the other ranks; blocks until all are there. Rank 0 hands in the store that it opened."""
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
    """Undo `join`. Does not wait for the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
