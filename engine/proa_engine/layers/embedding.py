"""Token embedding and LM head, sharded over ranks by vocabulary."""

import torch
import torch.nn.functional as F

from proa_engine.kernels.products.gpu_linear import make_linear
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Slice, Weights


def take_vocab_share(weights: Weights, vocab_size: int, hidden_size: int, parallel: ParallelContext) -> torch.Tensor:
    """Take this rank's rows [ceil(vocab_size / world_size), hidden_size]; the last rank's may end in zeros."""
    share = -(-vocab_size // parallel.world_size)
    start = min(parallel.rank * share, vocab_size)
    length = min(share, vocab_size - start)
    rows = weights.take("weight", (vocab_size, hidden_size), Slice(0, start, length))
    return rows if length == share else F.pad(rows, (0, 0, 0, share - length))


class VocabParallelEmbedding:
    """Token embedding; each rank holds a range of the vocabulary, and the ranks' results are summed."""

    def __init__(self, rows: torch.Tensor, parallel: ParallelContext) -> None:
        self.rows = rows
        self.parallel = parallel

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64 -> [T, hidden_size]"""
        if self.parallel.world_size == 1:
            return F.embedding(input_ids, self.rows)
        local = input_ids - self.parallel.rank * self.rows.shape[0]
        is_mine = (local >= 0) & (local < self.rows.shape[0])
        vectors = F.embedding(torch.where(is_mine, local, 0), self.rows)
        return self.parallel.all_reduce(vectors.masked_fill_(~is_mine[:, None], 0))


class LMHead:
    """Logits over the whole vocabulary, on every rank."""

    def __init__(
        self, rows: torch.Tensor, vocab_size: int, parallel: ParallelContext, *, batch_invariant: bool
    ) -> None:
        self.linear = make_linear(rows, batch_invariant=batch_invariant)
        self.vocab_size = vocab_size
        self.parallel = parallel

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> logits [R, vocab_size] in the weights' type"""
        logits = self.parallel.all_gather_last_dim(self.linear(hidden))
        return logits[:, : self.vocab_size]
