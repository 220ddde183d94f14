"""Blocks of (token, expert) pairs: how the pairs are grouped and how many rows a block has."""

import pytest
import torch

from proa_engine.kernels.experts.moe import rows_per_block
from proa_engine.kernels.experts.moe_few import MAX_PAIRS
from proa_engine.kernels.experts.moe_pairs import ExpertRange, align_pairs_reference, is_held
from support.quantized_cases import routing


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "used", "block_size"),
    [(1, 1, 1, 1, 16), (3, 2, 5, 5, 16), (130, 3, 5, 4, 32), (256, 8, 128, 100, 32), (8192, 8, 128, 128, 128)],
)
def test_every_pair_is_in_one_block_of_its_expert(
    tokens: int, k: int, experts: int, used: int, block_size: int
) -> None:
    chosen = experts - 1 - routing(tokens, k, used)  # the first experts get no token
    blocks = align_pairs_reference(chosen, ExpertRange.all(experts), block_size)
    num_used = int(blocks.num_blocks)
    assert num_used <= blocks.max_blocks
    pairs = blocks.pairs[: num_used * block_size].view(num_used, block_size)
    is_pair = pairs < tokens * k
    assert is_pair.any(1).all()
    of_expert = blocks.experts[:num_used, None].expand_as(pairs)[is_pair]
    assert torch.equal(chosen.flatten()[pairs[is_pair].long()], of_expert)
    assert torch.equal(pairs[is_pair], torch.arange(tokens * k)[chosen.flatten().argsort(stable=True)].int())


@pytest.mark.parametrize("held", [ExpertRange(0, 3, 11), ExpertRange(4, 5, 11), ExpertRange(10, 1, 11)])
def test_pairs_of_other_experts_are_in_no_block(held: ExpertRange) -> None:
    chosen = routing(130, 3, held.total)
    blocks = align_pairs_reference(chosen, held, 16)
    num_used = int(blocks.num_blocks)
    pairs = blocks.pairs[: num_used * 16].view(num_used, 16)
    is_pair = pairs < chosen.numel()
    assert is_pair.any(1).all()
    assert torch.equal(pairs[is_pair].sort().values.long(), is_held(chosen, held).flatten().nonzero().flatten())
    of_expert = blocks.experts[:num_used, None].expand_as(pairs)[is_pair]
    assert torch.equal(chosen.flatten()[pairs[is_pair].long()], held.first + of_expert)


@pytest.mark.parametrize("tokens", [1, 7, 64, 127, 128, 256, 319, 320, 512, 700])
def test_decodes_read_each_experts_weights_once(tokens: int) -> None:
    torch.manual_seed(0)
    num_experts, k = 128, 8
    block_size = rows_per_block(tokens * k, num_experts)
    counts = torch.stack([routing(tokens, k, num_experts).flatten().bincount(minlength=num_experts) for _ in range(20)])
    num_blocks = (counts + block_size - 1) // block_size
    assert num_blocks.sum() <= 1.01 * (counts > 0).sum()


@pytest.mark.parametrize(
    ("num_experts", "k"), [(128, 8), (60, 4), (16, 1), (16, 2), (16, 4), (12, 2), (8, 2), (5, 3), (4, 2), (2, 1)]
)
def test_powers_of_two_tokens_meet_every_block_size(num_experts: int, k: int) -> None:
    """Warm-up compiles the kernels for these numbers of tokens. Fewer pairs are not sorted into blocks."""
    met = {rows_per_block(k << power, num_experts) for power in range(14) if k << power > MAX_PAIRS}
    assert met == {rows_per_block(pairs, num_experts) for pairs in range(k, 8192 * k + 1, k) if pairs > MAX_PAIRS}
