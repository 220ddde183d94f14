"""Process group of an engine's ranks, over a TCPStore that rank 0 opens for each engine start.

The ranks' own traffic (gloo or NCCL) is not encrypted. It uses the network interface with the route to rank 0: the
loopback interface if all ranks are on one machine.
"""

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from proa_engine.layers.parallel import ParallelContext
from proa_engine.ranks.interfaces import interface_to

LOOPBACK = "127.0.0.1"
_JOIN_TIMEOUT = timedelta(minutes=30)  # a rank may load its weights far slower than another
# Of an exchange between ranks. On a CPU a pipeline stage may wait for hours, until another one has computed a chunk
# behind a long context: a rank that does not answer is found by the watchdog, whose limit grows with the step's work.
EXCHANGE_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address at which the ranks join. A generation is one start of the engine; its number is unique."""

    generation: int
    host: str  # an address of rank 0's machine
    port: int
    rank: int
    world_size: int


ALONE = Rendezvous(0, "", 0, 0, 1)  # of an engine with one rank, which joins nothing


def open_store(host: str, world_size: int) -> TCPStore:
    """Open rank 0's store on a free port (`store.port`) of `host`. It has no authentication, so it listens on no other
    address, as it would by itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=world_size)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=_JOIN_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def join(rendezvous: Rendezvous, device: torch.device, store: Store | None = None) -> ParallelContext:
    """Join the process group. Blocks until all ranks have joined. Rank 0 passes the store that it opened."""
    if rendezvous == ALONE:
        return ParallelContext(0, 1, None)
    if (interface := interface_to(rendezvous.host)) is not None:  # None: the libraries choose one
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" also names that begin so
    if store is None:
        store = TCPStore(
            rendezvous.host, rendezvous.port, rendezvous.world_size, is_master=False, timeout=_JOIN_TIMEOUT
        )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(str(rendezvous.generation), store),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=EXCHANGE_TIMEOUT,
    )
    return ParallelContext(rendezvous.rank, rendezvous.world_size, dist.group.WORLD)


def leave() -> None:
    """Leave the process group, without waiting for the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()
