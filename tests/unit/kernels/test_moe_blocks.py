"""Blocks of (token, expert) pairs: how the pairs are grouped."""

import pytest
import torch

from proa_engine.kernels.moe_align import align_pairs_reference
from support.quantized_cases import routing


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "used", "block_size"),
    [(1, 1, 1, 1, 16), (3, 2, 5, 5, 16), (130, 3, 5, 4, 32), (256, 8, 128, 100, 32), (8192, 8, 128, 128, 128)],
)
def test_every_pair_is_in_one_block_of_its_expert(
    tokens: int, k: int, experts: int, used: int, block_size: int
) -> None:
    chosen = experts - 1 - routing(tokens, k, used)  # the first experts get no token
    blocks = align_pairs_reference(chosen, experts, block_size)
    num_used = int(blocks.num_blocks)
    assert num_used <= blocks.max_blocks
    pairs = blocks.pairs[: num_used * block_size].view(num_used, block_size)
    is_pair = pairs < tokens * k
    assert is_pair.any(1).all()
    of_expert = blocks.experts[:num_used, None].expand_as(pairs)[is_pair]
    assert torch.equal(chosen.flatten()[pairs[is_pair].long()], of_expert)
    assert torch.equal(pairs[is_pair], torch.arange(tokens * k)[chosen.flatten().argsort(stable=True)].int())
