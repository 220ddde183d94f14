"""ParallelContext: the tensor parallel rank, and collectives between ranks.

At world size 1 every method returns its input and no process group exists. LayerContext: what all layers of a model
are built with.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from proa_engine.layers.rotary import RotaryTables
from proa_engine.layers.shares import HeadShares, Share, even_share, share_heads, share_width


class SymmetricMemory(Protocol):
    """Memory of the ranks that each of them reads directly."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """Sum x [...] over all ranks, with the same bits on each; may overwrite `x`. None if the process group must,
        which depends only on the tensor's size, type and layout."""
        ...


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """One of `world_size` tensor parallel ranks. `group` is their gloo or NCCL process group."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    divides_latents: bool = False  # the rows of latent attention are divided among the ranks
    symmetric: SymmetricMemory | None = None  # None: all sums are the group's

    def part(self, total: int, what: str) -> Share:
        """Return this rank's share of `total`, equal on all ranks. Raises ValueError, naming `what`, if it is not
        divisible by the ranks."""
        return even_share(total, self.rank, self.world_size, what)

    def width(self, width: int, unit: int, what: str) -> Share:
        """Return this rank's share of an inner width, as `share_width`."""
        return share_width(width, unit, self.rank, self.world_size, what)

    def heads(self, num_heads: int, num_shared: int, what: str) -> HeadShares:
        """Return this rank's heads and the shared heads that they use, as `share_heads`."""
        return share_heads(num_heads, num_shared, self.rank, self.world_size, what)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [...] over all ranks, on every rank; may overwrite `x`.

        The sum of two addends is commutative, so any algorithm gives the same bits. With more ranks gloo's order of
        addition depends on an element's position in the buffer, so a token's result would depend on its batch; then
        parts are gathered and added in rank order.
        """
        if self.world_size == 1:
            return x
        if self.symmetric is not None and (total := self.symmetric.all_reduce(x)) is not None:
            return total
        if x.is_cuda or self.world_size == 2:
            dist.all_reduce(x, group=self.group)
            return x
        parts = self._all_gather(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate all ranks' x [..., N] in rank order, on every rank: [..., N * world_size]."""
        return x if self.world_size == 1 else torch.cat(self._all_gather(x), dim=-1)

    def reduce_scatter_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [..., N * world_size] over all ranks, and return this rank's part [..., N] of the sum, in rank
        order."""
        if not x.is_cuda:
            return self.all_reduce(x).chunk(self.world_size, dim=-1)[self.rank]
        parts = torch.stack(x.chunk(self.world_size, dim=-1))
        part = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(part, parts, group=self.group)
        return part

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Rank `source`'s x [...], on every rank; overwrites the other ranks' `x`, whose type and shape must equal
        it."""
        if self.world_size > 1:
            dist.broadcast(x, source, group=self.group)
        return x

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts


@dataclass(frozen=True, slots=True)
class LayerContext:
    hidden_size: int
    parallel: ParallelContext
    rotary: RotaryTables  # shared, so that equal tables exist once
    expert_parallel: bool = False  # each rank holds some experts whole; False: a share of the width of all
