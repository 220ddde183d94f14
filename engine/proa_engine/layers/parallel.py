"""ParallelContext: which tensor parallel rank this is and how ranks exchange tensors. Knows nothing of layers.

At world size 1 every method returns its input and no process group exists.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """One rank's place among the tensor parallel ranks. `group` is a gloo or NCCL group of `world_size` ranks."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total` equal things. Raises ValueError, naming `what`, if they cannot be shared out."""
        if total % self.world_size:
            raise ValueError(f"{what} ({total}) cannot be divided by tensor_parallel_size ({self.world_size})")
        return total // self.world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, on every rank; may overwrite `x`.

        Two addends commute, so any algorithm gives the same bits. With more ranks gloo's order of addition depends on
        an element's place in the buffer, which would make a token's result depend on its batch; there we add by rank.
        """
        if self.world_size == 1:
            return x
        if x.is_cuda or self.world_size == 2:
            dist.all_reduce(x, group=self.group)
            return x
        parts = self._all_gather(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` [..., N] side by side in rank order, on every rank: [..., N * world_size]."""
        return x if self.world_size == 1 else torch.cat(self._all_gather(x), dim=-1)

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return parts
