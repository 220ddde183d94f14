"""Point-to-point links between pipeline stages.

The stages form a ring: each rank sends to the rank with the same tensor-parallel rank on the next stage, and the last
stage sends to the first. Each link is a process group of its own, so that on a GPU a stage's sends do not wait for what
it receives.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from proa_engine.layers.cache_layers import CacheLayer
from proa_engine.layers.parallel import ParallelContext
from proa_engine.ranks.distributed import EXCHANGE_TIMEOUT


class StageLinks(Protocol):
    def send(self, x: Tensor) -> None:
        """Send `x` to the next stage without waiting for it. `x` must be contiguous and not change afterwards."""
        ...

    def receive(self, x: Tensor) -> None:
        """Fill the contiguous tensor `x` with what the stage before sent, of the same type and shape."""
        ...

    def gather_layers(self, own: Sequence[CacheLayer]) -> tuple[Sequence[CacheLayer], int]:
        """Return the layers of all stages, and the index of the first of `own`, this stage's. Every rank of the engine
        must call it."""
        ...


class NoLinks:
    """The links of a model's only stage."""

    def send(self, x: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def receive(self, x: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def gather_layers(self, own: Sequence[CacheLayer]) -> tuple[Sequence[CacheLayer], int]:
        return own, 0


@dataclass(frozen=True, slots=True)
class _Link:
    group: dist.ProcessGroup
    source: int  # rank in the engine
    target: int


class RingLinks:
    """The links of one rank of several stages."""

    def __init__(
        self, parallel: ParallelContext, stage: int, num_stages: int, from_before: _Link, to_next: _Link
    ) -> None:
        self._parallel = parallel
        self._stage = stage
        self._num_stages = num_stages
        self._from_before = from_before
        self._to_next = to_next
        # Sends that may not have ended, with their tensors. A stage may be ahead of the next one by as many as there
        # are stages, since steps that sample nothing return nothing to the first stage that would limit it.
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        link = self._to_next
        work = dist.isend(x, link.target, link.group)
        assert work is not None, "this rank is in its links' groups"
        self._sends.append((work, x))
        if len(self._sends) > self._num_stages:
            oldest, _ = self._sends.popleft()
            oldest.wait()

    def receive(self, x: Tensor) -> None:
        link = self._from_before
        dist.recv(x, link.source, link.group)

    def gather_layers(self, own: Sequence[CacheLayer]) -> tuple[Sequence[CacheLayer], int]:
        num_stages, parallel = self._num_stages, self._parallel
        of_ranks: list[Sequence[CacheLayer]] = [()] * (num_stages * parallel.world_size)
        dist.all_gather_object(of_ranks, own)
        stages = of_ranks[parallel.rank :: parallel.world_size]
        first = sum(map(len, stages[: self._stage]))
        return [layer for stage in stages for layer in stage], first


def join_stages(world: ParallelContext, num_stages: int) -> tuple[ParallelContext, StageLinks]:
    """Divide the ranks of an engine among `num_stages` stages. Returns the ranks of this rank's stage, and its links.

    Every rank of `world` must call it.
    """
    if num_stages == 1:
        return world, NoLinks()
    size = world.world_size // num_stages
    stage, rank = divmod(world.rank, size)
    # Each rank makes all groups, also those that it is not in, in the same order.
    stages = [_group(range(first, first + size)) for first in range(0, world.world_size, size)]
    links = [
        _Link(_group((source, target)), source, target)
        for source, target in ((source, (source + size) % world.world_size) for source in range(world.world_size))
    ]
    parallel = ParallelContext(rank, size, stages[stage] if size > 1 else None)
    return parallel, RingLinks(parallel, stage, num_stages, links[world.rank - size], links[world.rank])


def _group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=EXCHANGE_TIMEOUT)
    return group
