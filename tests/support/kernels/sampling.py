"""Sampling of tokens: penalties, masks, limits, draws; inputs of decodes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.kernels.sampling.decode_inputs import DecodeInputs, decode_inputs, decode_inputs_reference
from proa_engine.kernels.sampling.draw_tokens import draw_decodes, draw_tokens, draw_tokens_reference
from proa_engine.kernels.sampling.penalties import CHUNK, COUNTED, penalize, penalize_reference
from proa_engine.kernels.sampling.token_bitmask import token_bitmask
from proa_engine.kernels.sampling.token_limits import (
    limit_candidates,
    search_thresholds,
    token_limits,
    token_limits_reference,
)
from support.kernel_cases import limit_cases, mask_cases, sampling_cases, top_k_case
from support.kernels.case import WITHOUT_DTYPE, KernelCase, equal, holds, on_device, table
from support.noise_kernel import chi_square_of_draws, exact_noise, noise_of, words_of_all_sizes
from support.thorough import THOROUGH


def inputs_of_decodes(
    slots: Sequence[int],
    lengths: Sequence[int],
    counts: Sequence[int],
    width: int,
    max_tokens: int,
    max_blocks: int,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    """Rows of which the last is padding, and whose tables are longer than what they use."""
    token_ids = torch.randint(500, (6, max_tokens), dtype=torch.int32)
    block_tables = torch.randint(40, (3, 6, max_blocks), dtype=torch.int32)
    deltas = -torch.arange(6) if width > 1 else None
    return torch.tensor([slots, lengths, counts]), token_ids, block_tables, 4, width, deltas


def used(inputs: DecodeInputs) -> list[Tensor]:
    num_blocks = [-(-seq_len // 4) for seq_len in inputs.seq_lens.tolist()]
    tables = [inputs.block_tables[:, row, :count] for row, count in enumerate(num_blocks)]
    return [inputs.input_ids, inputs.positions, inputs.seq_lens, inputs.slot_mappings, *tables]


DECODE_INPUTS = KernelCase(
    make=inputs_of_decodes,
    operation=lambda *rows: used(decode_inputs(*rows)),
    reference=lambda *rows: used(decode_inputs_reference(*rows)),
    compare=equal,
    interpreted=table(
        "slots lengths counts width max_tokens max_blocks",
        ((5, 1, 2, 0), (89, 3, 37, 0), (1, 1, 1, 0), 1, 90, 23),
        ((5, 1, 2, 0), (89, 3, 37, 0), (1, 2, 3, 0), 3, 90, 23),
    ),
    gpu=table(
        "slots lengths counts width max_tokens max_blocks",
        ((5, 0, 2, 0), (2801, 1, 38, 0), (1, 1, 1, 0), 1, 3000, 2100),
        ((5, 0, 2, 0), (2801, 1, 38, 0), (5, 1, 3, 0), 5, 3000, 2100),
    ),
    dtypes=WITHOUT_DTYPE,
)


@holds(interpreted=[{}], gpu=[{}])
def token_masks(dtype: torch.dtype, device: str) -> None:
    for each in {dtype, torch.bfloat16}:  # stores no computed value, so the interpreter's bfloat16 is right
        for case in on_device(mask_cases(each), device):
            token_bitmask(case.logits, case.rows, case.bits)
            equal(case.logits, case.expected)


@holds(interpreted=[{"every_top_k": 1 if THOROUGH else 23}], gpu=[{"every_top_k": 1}])
def limits_of_tokens(dtype: torch.dtype, device: str, every_top_k: int) -> None:
    for each in {dtype, torch.bfloat16}:  # only compares the logits, so the interpreter's bfloat16 is right
        for case in (*sampling_cases(each), top_k_case(each, every_top_k)):
            arguments = case.logits, case.params, case.slots
            case.check_limits(token_limits(*on_device(arguments, device)))
            case.check_limits(token_limits_reference(*arguments))


@holds(interpreted=[{}], gpu=[{}])
def limits_among_candidates(dtype: torch.dtype, device: str) -> None:
    """All logits above the bound are candidates, and a search among them finds what a search of the row does."""
    (case,) = limit_cases(dtype)
    case.check_limits(token_limits_reference(case.logits, case.params, case.slots))
    arguments = on_device((case.logits, case.params, case.slots), device)
    candidates, figures = limit_candidates(*arguments)
    thresholds, bounds = search_thresholds(*(*arguments, candidates, figures)), figures[:, 1].amax(1)
    for logits, found, bound in zip(arguments[0], candidates, bounds, strict=True):
        equal(logits[logits > bound].sort().values, found[found > bound].sort().values)
    case.check_limits(thresholds)
    figures[:, 1] = torch.inf
    of_rows = search_thresholds(*(*arguments, candidates, figures))
    case.check_limits(of_rows)
    if device == "cpu":  # GPUs may add up a row's probabilities in another order than its candidates'
        equal(of_rows, thresholds)
        assert 0 < int((thresholds > bounds).sum()) < len(thresholds)


@holds(interpreted=[{}], gpu=[{}])
def draws(dtype: torch.dtype, device: str) -> None:
    """The last row of decodes is padding, which has no tokens."""
    for case in sampling_cases(dtype):
        arguments = case.logits, case.params, case.slots, case.positions
        there = on_device(arguments, device)
        for has_limits in (False, True):
            ours = draw_tokens(*there, has_limits=has_limits).cpu()
            # On a GPU two tokens may have the same noise but for the last bit.
            theirs = draw_tokens_reference(*arguments, has_limits=has_limits)
            assert int((ours != theirs).sum()) <= (device != "cpu")
        logits, params, slots, positions = there
        rows = torch.stack([slots, positions, torch.ones_like(slots)])
        rows[:, -1] = 0
        token_ids = torch.full((len(case.params), 5001), -1, dtype=torch.int32, device=device)
        drawn = draw_decodes(logits, params, rows, token_ids)
        again = draw_tokens_reference if device == "cpu" else draw_tokens  # or the noise would differ
        equal(drawn, again(logits, params, *rows[:2], has_limits=True))
        written = torch.full_like(token_ids, -1).index_put_((rows[0, :-1], rows[1, :-1]), drawn[:-1].int())
        equal(token_ids, written)


@holds(gpu=[{}])
def draws_of_nan_are_tokens(dtype: torch.dtype, device: str) -> None:
    """NaN logits of one request must not become an index out of bounds, which is a sticky CUDA error."""
    for case in on_device(sampling_cases(dtype), device):
        logits = torch.full_like(case.logits, torch.nan)
        for has_limits in (False, True):
            token_ids = draw_tokens(logits, case.params, case.slots, case.positions, has_limits=has_limits)
            assert 0 <= token_ids.min() <= token_ids.max() < logits.shape[1]


@holds(interpreted=[{"draws": 20_000}], gpu=[{"draws": 1_000_000}], dtypes=WITHOUT_DTYPE)
def noise(dtype: torch.dtype, device: str, draws: int) -> None:
    """In both tails it is close to the exact one, by a GPU's quick logarithm too."""
    words = words_of_all_sizes()
    torch.testing.assert_close(noise_of(words.to(device)).cpu().double(), exact_noise(words), atol=1e-5, rtol=0)
    assert chi_square_of_draws(draws, device) < 24.3


def penalized_rows(rows: int, length: int, vocab_size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Rows in any slots, one in three without penalties. Logits are part of wider rows, and tokens below 0 are none."""
    params = torch.zeros(rows + 2, columns.NUM_COLUMNS, dtype=torch.float64)
    for column, penalties in {
        columns.REPETITION: (1.0, 1.3, 0.7),
        columns.FREQUENCY: (0.0, 0.4, -0.5),
        columns.PRESENCE: (0.0, 1.1, 0.0),
    }.items():
        params[:, column] = torch.tensor(penalties, dtype=torch.float64).repeat(rows + 2)[: rows + 2]
    params[:, columns.NUM_PROMPT] = torch.randint(1, length, (rows + 2,))
    token_ids = torch.randint(-1, min(vocab_size, 40), (rows + 2, length), dtype=torch.int32)
    slots, num_tokens = torch.randperm(rows + 2)[:rows], torch.randint(1, length + 1, (rows,))
    logits = 3 * torch.randn(rows, vocab_size + 8).to(dtype)[:, :vocab_size]
    return logits, token_ids, params, slots, num_tokens, length


PENALIZE = KernelCase(
    make=penalized_rows,
    operation=penalize,
    reference=penalize_reference,
    interpreted=table("rows length vocab_size", (1, 3, 30), (7, COUNTED + 9, CHUNK + 30)),
    gpu=table("rows length vocab_size", (1, 3, 30), (7, COUNTED + 9, CHUNK + 30), (130, 5000, 151_936)),
)
