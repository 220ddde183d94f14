"""Pooler: hidden states to the results of pooled requests, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from proa_engine.models.base import CausalLM
from proa_engine.models.pooling_heads import PoolingHeads
from proa_engine.worker.pooling_inputs import PooledGroup, PoolingInputs, Sums


class Pooler:
    """`sums` [slots, hidden_size] float32 keep what earlier chunks of a prompt add to its result; None: no task of the
    model needs them."""

    def __init__(self, model: CausalLM, heads: PoolingHeads, sums: Tensor | None) -> None:
        self._model = model
        self._heads = heads
        self._sums = sums

    def pool(self, inputs: PoolingInputs, arrays: Sequence[Tensor], hidden: Tensor) -> list[Tensor]:
        """The results of each group, [rows, values] float32, the same on every rank.

        `arrays` are the step's staged arrays, `hidden` [tokens, hidden_size] its hidden states.
        """
        if inputs.sums is not None:
            self._add(inputs.sums, arrays, hidden)
        return [self._results(group, arrays, hidden) for group in inputs.groups]

    def _add(self, sums: Sums, arrays: Sequence[Tensor], hidden: Tensor) -> None:
        assert self._sums is not None
        states, slots = hidden.index_select(0, arrays[sums.hidden_rows]).float(), arrays[sums.slots]
        added = torch.segment_reduce(states, "sum", lengths=arrays[sums.lengths])
        before = self._sums.index_select(0, slots).masked_fill_(arrays[sums.is_first].bool()[:, None], 0.0)
        self._sums.index_copy_(0, slots, before + added)

    def _results(self, group: PooledGroup, arrays: Sequence[Tensor], hidden: Tensor) -> Tensor:
        rows = arrays[group.rows]
        if group.token_ids is not None:
            logits = self._model.compute_logits(hidden.index_select(0, rows)).float()
            chosen = logits.gather(1, arrays[group.token_ids].view(len(rows), -1))
            return chosen - logits.logsumexp(dim=-1, keepdim=True)
        if group.counts is None:
            vectors = hidden.index_select(0, rows).float()
        else:
            assert self._sums is not None
            vectors = self._sums.index_select(0, rows) / arrays[group.counts][:, None]
        return self._heads(vectors, group.task, dimensions=group.dimensions, use_activation=group.use_activation)
