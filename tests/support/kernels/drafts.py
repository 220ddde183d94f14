"""Draft tokens: of n-grams, of drafters, and what the end of a step keeps of them."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from proa_engine.kernels.sampling import draft_ends, drafts
from proa_engine.kernels.sampling.draft_ends import COMPARED, compare_drafts, keep_reads, next_token_ids
from proa_engine.kernels.sampling.draft_rows import add_drafts, begin_drafts, settle_rows
from proa_engine.kernels.sampling.draft_state import DraftState
from proa_engine.kernels.sampling.sampling_params import NUM_COLUMNS, TEMPERATURE
from support.kernels.case import WITHOUT_DTYPE, KernelCase, equal, table


def ended_rows(
    rows: int, length: int, vocabulary: int, width: int, ngrams: tuple[int, int], dtype: torch.dtype
) -> tuple[Any, ...]:
    """Rows of 9 slots, some without tokens, and ends on both sides of the known tokens."""
    lengths, slots = torch.randint(1, length + 1, (9,)), torch.randperm(9)[:rows]
    num_tokens = torch.randint(0, width + 2, (rows,))
    ends = torch.where(num_tokens > 0, lengths[slots] + num_tokens + torch.randint(-2, 4, (rows,)), 0)
    token_ids = torch.randint(0, vocabulary, (9, length + width), dtype=torch.int32)
    return torch.stack((slots, ends, num_tokens)), token_ids, lengths, torch.zeros(9, width, dtype=torch.int64), ngrams


def proposed(propose: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
    def run(*tensors_and_ngrams: Any) -> tuple[Tensor, ...]:
        *tensors, (min_ngram, max_ngram) = tensors_and_ngrams
        propose(*tensors, min_ngram=min_ngram, max_ngram=max_ngram)
        return tuple(tensors)

    return run


PROPOSE_NGRAMS = KernelCase(
    make=ended_rows,
    operation=proposed(drafts.propose_ngrams),
    reference=proposed(drafts.propose_ngrams_reference),
    compare=equal,
    interpreted=table(
        "rows length vocabulary width ngrams",
        (3, 1, 3, 2, (1, 2)),
        (5, 90, 4, 5, (2, 4)),
        (2, 2 * drafts.BLOCK + 7, 50, 3, (1, 3)),
    ),
    gpu=table(
        "rows length vocabulary width ngrams",
        *((6, 4900, vocabulary, width, (1, 4)) for vocabulary, width in ((2, 1), (4, 5), (3, 8))),
    ),
    dtypes=WITHOUT_DTYPE,
)


def verified_drafts(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Samples of tokens 0 and 1, and drafts of as many tokens, or fewer, as were verified."""
    num_samples = torch.randint(1, width + 2, (rows,))
    slots = torch.randperm(9)[:rows]
    proposed = torch.randint(-1, 2, (9, width))
    proposed[(proposed == drafts.NONE).cumsum(1) > 0] = drafts.NONE
    proposed[slots] = proposed[slots].masked_fill(torch.arange(width) >= num_samples[:, None] - 1, drafts.NONE)
    token_ids = torch.randint(0, 2, (int(num_samples.sum()),))
    first_samples = num_samples.cumsum(0) - num_samples
    return token_ids, slots.repeat_interleave(num_samples), first_samples, proposed, torch.randint(1, 99, (9,))


ACCEPT_DRAFTS = KernelCase(
    make=verified_drafts,
    operation=lambda *tensors: (drafts.accept_drafts(*tensors), tensors[-1]),
    reference=lambda *tensors: (drafts.accept_drafts_reference(*tensors), tensors[-1]),
    compare=equal,
    interpreted=table("rows width", (1, 1), (5, 3), (6, 4)),
    gpu=table("rows width", (6, 1), (6, 5), (6, 8)),
    dtypes=WITHOUT_DTYPE,
)


def draft_state(slots: int, width: int, ways: int, tokens: int) -> DraftState:
    """Of requests of all lengths up to `tokens`, some of which can have no drafts, at temperatures in all ranges."""
    params = torch.rand(slots, NUM_COLUMNS, dtype=torch.float64)
    params[:, TEMPERATURE] *= 1.2
    bounds = torch.tensor([0.2, 0.5, 0.85], dtype=torch.float64)
    params[:3, TEMPERATURE] = bounds  # a range has its lower end
    matches = torch.rand(4, ways, dtype=torch.float64)
    matches[1] = 0.5  # the first among equals
    return DraftState(
        token_ids=torch.randint(-1, 500, (slots, tokens + width + 1), dtype=torch.int32),
        lengths=torch.randint(1, tokens + 1, (slots,)),
        can_draft=torch.randint(2, (slots + 1,)),
        drafts=torch.randint(-1, 500, (slots + 1, width)),
        first=torch.randint(3, (slots + 1, ways)),
        params=params,
        factors=torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)[-ways:],
        bounds=bounds,
        matches=matches,
    )


def rows_with_drafts(rows: int, width: int, ways: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Rows of which the last is padding, then the state, and tokens that each way has drawn for each place."""
    state = draft_state(rows + 2, width, ways, 40)
    slots, counts = torch.randperm(rows + 2)[:rows], torch.randint(1, width + 2, (rows,))
    ends = state.lengths[slots] + counts + torch.randint(-2, 3, (rows,))
    settled = torch.stack((slots, ends, counts))
    settled[:, -1] = 0
    return settled, state, torch.randint(500, (width, ways, rows))


def proposed_by_ways(rows: Tensor, state: DraftState, drawn: Tensor) -> tuple[Tensor, ...]:
    """Drafts of all places: of the first one by all ways, of the others by the way in use."""
    settle_rows(rows, state)
    begun, place = begin_drafts(rows, state)
    places = [place]
    for index, by_way in enumerate(drawn):
        places.append(add_drafts(by_way if index == 0 else by_way[:1], index, begun, state, are_ways=index == 0))
    return rows, begun.values, begun.params, state.token_ids, state.drafts, state.first, *(at.values for at in places)


def on_host(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The same by the references, also where the kernels would be interpreted."""

    def run(*arguments: Any) -> Any:
        with mock.patch.object(DraftState, "is_host", True), mock.patch.object(draft_ends, "INTERPRETED", False):
            return operation(*arguments)

    return run


PROPOSE_BY_WAYS = KernelCase(
    make=rows_with_drafts,
    operation=proposed_by_ways,
    reference=on_host(proposed_by_ways),
    compare=equal,
    interpreted=table("rows width ways", (1, 1, 1), (3, 3, 3), (7, 2, 3)),
    gpu=table("rows width ways", (1, 1, 1), (5, 3, 3), (200, 15, 3)),
    dtypes=WITHOUT_DTYPE,
)


def samples_with_drafts(rows: int, ways: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """More samples than rows, in slots some of which have no drafts."""
    state = draft_state(rows + 3, 2, ways, 9)
    state.drafts[::3, 0] = drafts.NONE
    slots, first_samples = torch.randperm(rows + 3)[:rows].repeat_interleave(2), torch.arange(0, 2 * rows, 2)
    return torch.randint(3, (2 * rows,)), slots, first_samples, state


def compared_with_counts(*arguments: Any) -> tuple[Tensor, Tensor]:
    return compare_drafts(*arguments), arguments[-1].matches


def equal_with_counts(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].cpu(), theirs[1], rtol=1e-12, atol=0)


COMPARE_DRAFTS = KernelCase(
    make=samples_with_drafts,
    operation=compared_with_counts,
    reference=on_host(compared_with_counts),
    compare=equal_with_counts,
    interpreted=table("rows ways", (1, 1), (5, 3), (COMPARED + 3, 3)),
    gpu=table("rows ways", (1, 1), (5, 3), (300, 3)),
    dtypes=WITHOUT_DTYPE,
)


def decoded_rows(rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Rows of which the last is padding."""
    token_ids = torch.randint(-1, 500, (rows + 2, 60), dtype=torch.int32)
    decoded = torch.stack((torch.randperm(rows + 2)[:rows], torch.randint(width, 60, (rows,)), torch.ones(rows)))
    decoded[:, -1] = 0
    return decoded.long(), token_ids, width


NEXT_TOKEN_IDS = KernelCase(
    make=decoded_rows,
    operation=next_token_ids,
    reference=on_host(next_token_ids),
    compare=equal,
    interpreted=table("rows width", (1, 1), (5, 4)),
    gpu=table("rows width", (1, 1), (200, 16)),
    dtypes=WITHOUT_DTYPE,
)


def read_by_entries(rows: int, width: int, size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """A step whose rows have up to `width` tokens, of which some were rejected; the last row is padding."""
    state = draft_state(rows + 2, width, 1, 40)
    state.lengths.add_(width)
    slots, seq_lens = torch.randperm(rows + 2)[:rows], torch.zeros(rows, dtype=torch.int32)
    rejected = torch.randint(width, (rows - 1,))
    seq_lens[:-1] = state.lengths[slots[:-1]] - 1 + rejected
    starts = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32)
    read, carry = torch.randn(rows * width, size, dtype=dtype), torch.zeros(rows + 3, size, dtype=dtype)
    return read, slots, starts, seq_lens, state, carry


def kept(*arguments: Any) -> tuple[Tensor, Tensor]:
    keep_reads(*arguments)
    *_, state, carry = arguments
    return carry, state.can_draft


KEEP_READS = KernelCase(
    make=read_by_entries,
    operation=kept,
    reference=on_host(kept),
    compare=equal,
    interpreted=table("rows width size", (1, 1, 8), (4, 3, draft_ends.BLOCK + 40)),
    gpu=table("rows width size", (2, 1, 8), (150, 4, 4096)),
)
