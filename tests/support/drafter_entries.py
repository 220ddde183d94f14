"""Checks what a drafter of one layer computes to store its entries."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from proa_engine.models.drafters.base import Entries, HiddenDrafter
from support.paged_model import attention_metadata, nan_caches

_ATTENTION = ("proa_engine.layers.attention.paged_attention", "proa_engine.layers.latent_rows.latent_attention")


def assert_entries_are_stored_alone(drafter: HiddenDrafter, read: Tensor, next_ids: Tensor) -> None:
    """The entries of one request's tokens, from the first on, equal those that the whole layer stores, and nothing else
    is computed: no attention, no output of it, no feed-forward layer, no logits."""
    num_tokens, blocks = len(read), [[6, 0, 3, 7, 1, 4]]
    of_layer, alone = (nan_caches(drafter, 8, 4) for _ in range(2))  # type: ignore[arg-type]
    metadata, positions = attention_metadata([num_tokens], [num_tokens], blocks, 4), torch.arange(num_tokens)
    drafter(Entries(read.clone(), next_ids, positions), of_layer, metadata)
    layer: Any = getattr(drafter, "layer", drafter)  # of `mtp`, else the drafter itself
    kept = read.clone()
    with ExitStack() as stack:
        refused: Any = AssertionError("computes more than the entries")
        for name in _ATTENTION:
            stack.enter_context(mock.patch(name, side_effect=refused))
        for owner, name in ((layer, "mlp"), (layer.attention, "output"), (type(drafter), "compute_logits")):
            stack.enter_context(mock.patch.object(owner, name, side_effect=refused))
        drafter.observe(Entries(read, next_ids, positions), alone, metadata)
    assert torch.equal(read, kept)
    for one, other in zip(of_layer, alone, strict=True):
        for expected, found in zip(one.tensors, other.tensors, strict=True):
            assert not expected.isnan().all()
            torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
