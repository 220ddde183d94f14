"""Where the rows of latent attention are: all on every rank, or divided among the ranks by their tokens.

Divided, a rank holds of each block of B tokens a run of B / ranks, and attends to these tokens with all heads. The
ranks' results are then added, weighted by their sums of weights, and each rank keeps those of its own heads. The KV
cache has room for as many times the tokens as there are ranks, and the scheduler's blocks stay the same. vLLM calls
this decode context parallelism; Helix Parallelism (arXiv 2507.07120) describes it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from proa_engine.kernels.attention.latent_attention import (
    PartRows,
    combine_factor,
    latent_attention,
    latent_attention_part,
)
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import LatentLayer, LayerCache
from proa_engine.layers.parallel import ParallelContext


class LatentRows(Protocol):
    """The rows of one rank's layers."""

    def layer(self, rank: int, rope_dim: int) -> LatentLayer:
        """What a layer with rows of `rank` + `rope_dim` values caches on this rank."""
        ...

    def slot_mapping(self, step: AttentionStep, cache: LayerCache) -> torch.Tensor:
        """Where this rank writes the step's rows [T] int64; -1: nowhere."""
        ...

    def attend(
        self, query: torch.Tensor, step: AttentionStep, cache: LayerCache, rank: int, scale: float
    ) -> torch.Tensor:
        """query [T, heads of this rank, rank + rope_dim] -> [T, heads of this rank, rank]"""
        ...


def latent_rows(parallel: ParallelContext, num_heads: int) -> LatentRows:
    """`num_heads`: of all ranks. Raises ValueError if the rows are divided and the heads cannot be divided evenly."""
    if not parallel.divides_latents:
        return WholeRows()
    if num_heads % parallel.world_size:
        raise ValueError(
            f"attention heads ({num_heads}) cannot be divided by decode_context_parallel_size "
            f"({parallel.world_size}): set it to 1, or change tensor_parallel_size"
        )
    return DividedRows(parallel)


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Every rank holds all rows."""

    def layer(self, rank: int, rope_dim: int) -> LatentLayer:
        return LatentLayer(rank, rope_dim)

    def slot_mapping(self, step: AttentionStep, cache: LayerCache) -> torch.Tensor:
        return step.metadata.tables[cache.table].slot_mapping

    def attend(
        self, query: torch.Tensor, step: AttentionStep, cache: LayerCache, rank: int, scale: float
    ) -> torch.Tensor:
        metadata = step.metadata
        return latent_attention(
            query,
            cache.tensors[0],
            rank,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.tables[cache.table].block_table,
            step.latent_plan(cache, query.shape[1]),
            num_decodes=metadata.num_decodes,
            scale=scale,
        )


@dataclass(frozen=True, slots=True)
class DividedRows:
    parallel: ParallelContext

    def layer(self, rank: int, rope_dim: int) -> LatentLayer:
        return LatentLayer(rank, rope_dim, num_shares=self.parallel.world_size)

    def slot_mapping(self, step: AttentionStep, cache: LayerCache) -> torch.Tensor:
        slots = step.metadata.tables[cache.table].slot_mapping
        return step.once(("slots", cache.layout), lambda: self._slots(slots, cache.tensors[0].shape[1]))

    def attend(
        self, query: torch.Tensor, step: AttentionStep, cache: LayerCache, rank: int, scale: float
    ) -> torch.Tensor:
        metadata, parallel = step.metadata, self.parallel
        num_heads, width = query.shape[1:]
        all_heads = parallel.all_gather_last_dim(query.flatten(1)).unflatten(1, (-1, width))
        out, log_sums = latent_attention_part(
            all_heads,
            cache.tensors[0],
            rank,
            metadata.query_start_loc,
            step.once(("rows", cache.layout), lambda: self._rows(step, cache, all_heads.shape[1])),
            metadata.tables[cache.table].block_table,
            num_decodes=metadata.num_decodes,
            scale=scale,
        )
        of_ranks = parallel.all_gather_last_dim(log_sums).unflatten(1, (parallel.world_size, -1))
        addend = (out * combine_factor(of_ranks, parallel.rank)[..., None]).to(out.dtype)
        return parallel.reduce_scatter_last_dim(addend.flatten(1)).view(-1, num_heads, rank)

    def _slots(self, slots: torch.Tensor, rows: int) -> torch.Tensor:
        """This rank's slots for slots of all ranks; `rows`: of one block on this rank."""
        size = rows * self.parallel.world_size
        offset = slots % size - self.parallel.rank * rows
        is_mine = (slots >= 0) & (offset >= 0) & (offset < rows)
        return torch.where(is_mine, slots // size * rows + offset, -1)

    def _rows(self, step: AttentionStep, cache: LayerCache, num_heads: int) -> PartRows:
        rows = cache.tensors[0].shape[1]
        seq_lens = self._num_held(step.metadata.seq_lens, rows)
        ends = self._num_held((step.positions + 1).to(torch.int32), rows)
        return PartRows(seq_lens, ends, step.latent_part_plan(seq_lens, num_heads))

    def _num_held(self, lengths: torch.Tensor, rows: int) -> torch.Tensor:
        """How many of a request's first `lengths` tokens this rank holds."""
        size = rows * self.parallel.world_size
        lengths = lengths.clamp_min(0)
        return lengths // size * rows + (lengths % size - self.parallel.rank * rows).clamp(0, rows)
