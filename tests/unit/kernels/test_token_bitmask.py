"""Masks on a CPU: forbidden tokens get -inf, and nothing else changes."""

import torch

from proa_engine.kernels.sampling.token_bitmask import token_bitmask
from support.kernel_cases import mask_cases


def test_tokens_whose_bit_is_0_are_forbidden() -> None:
    for case in mask_cases(torch.float32):
        token_bitmask(case.logits, case.rows, case.bits)
        assert torch.equal(case.logits, case.expected)


def test_without_masked_rows_nothing_changes() -> None:
    logits = torch.randn(2, 40)
    expected = logits.clone()
    token_bitmask(logits, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int32))
    assert torch.equal(logits, expected)
