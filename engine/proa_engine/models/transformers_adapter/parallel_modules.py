"""Modules around those of a model of `transformers` whose weights are divided among tensor parallel ranks.

They do the ranks' collectives.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from proa_engine.layers.parallel import ParallelContext


class _Around(nn.Module):
    """Holds `inner`; other attributes are those of `inner`, which the model may read."""

    def __init__(self, inner: nn.Module, parallel: ParallelContext) -> None:
        super().__init__()
        self.inner = inner
        self.parallel = parallel

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


class SummedOutput(_Around):
    """Each rank computes an addend of the output: of its inputs, or of its share of every expert."""

    def __init__(self, inner: nn.Module, parallel: ParallelContext) -> None:
        super().__init__(inner, parallel)
        if parallel.rank > 0 and isinstance(inner, nn.Linear):
            inner.register_parameter("bias", None)  # only rank 0 adds it

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        return self.parallel.all_reduce(self.inner(x, *others, **options).contiguous())


class SummedShare(SummedOutput):
    """As `SummedOutput`, of an input that all ranks have whole."""

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        size = x.shape[-1] // self.parallel.world_size
        return super().forward(x.narrow(-1, self.parallel.rank * size, size))


class GatheredOutput(_Around):
    """A linear layer of whose outputs each rank computes a range, the last ranks a shorter one."""

    def __init__(self, inner: nn.Linear, parallel: ParallelContext) -> None:
        super().__init__(inner, parallel)
        self.size = inner.out_features  # of all ranks
        self.share = -(-self.size // parallel.world_size)

    def forward(self, x: Tensor) -> Tensor:
        part = self.inner(x)
        whole = self.parallel.all_gather_last_dim(F.pad(part, (0, self.share - part.shape[-1])))
        return whole[..., : self.size].contiguous()


class DividedInput(_Around):
    """A module that passes on its input, on every rank, inside of one whose output is summed."""

    def forward(self, x: Tensor, *others: Any, **options: Any) -> Tensor:
        output: Tensor = self.inner(x / self.parallel.world_size, *others, **options)
        return output


class VocabRange(_Around):
    """An embedding of which each rank holds a range of rows, the last ranks a shorter one."""

    def __init__(self, inner: nn.Embedding, parallel: ParallelContext) -> None:
        super().__init__(inner, parallel)
        self.start = parallel.rank * -(-inner.num_embeddings // parallel.world_size)
        self.size = len(inner.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        local = input_ids - self.start
        is_mine = (local >= 0) & (local < self.size)
        vectors: Tensor = self.inner(local.where(is_mine, 0))
        return self.parallel.all_reduce(vectors.masked_fill(~is_mine[..., None], 0))
