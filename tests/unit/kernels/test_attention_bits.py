"""Attention on the CPU gives a token the same bits as a decode and in a prompt, in every batch."""

import pytest
import torch

from proa_engine.kernels.attention.attention_plan import plan_reference
from proa_engine.kernels.attention.paged_attention_reference import paged_attention_reference

BLOCK_SIZE = 16
NUM_BLOCKS = 64


def attend(
    query: torch.Tensor,
    caches: torch.Tensor,
    tables: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    window: int | None,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    plan = plan_reference(starts, torch.tensor(seq_lens), tables, caches.shape[1:], window)
    return paged_attention_reference(query, caches[0], caches[1], plan, 0.25, sinks, soft_cap)


@pytest.mark.parametrize(
    ("window", "has_sinks", "soft_cap"),
    [
        (None, False, None),
        (40, False, None),
        (200, False, None),
        (None, True, None),
        (40, True, 2.0),
        (None, False, 2.0),
    ],
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [(6, 6, 32, torch.float32), (8, 2, 64, torch.float32), (7, 1, 128, torch.float32), (4, 2, 64, torch.bfloat16)],
)
def test_a_token_has_the_same_bits_as_a_decode_and_in_a_prompt(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    has_sinks: bool,
    soft_cap: float | None,
) -> None:
    length = 420
    scores = torch.randn(num_heads) if has_sinks else None, soft_cap
    caches = torch.randn(2, NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_dim).to(dtype)
    table = torch.randperm(NUM_BLOCKS)[None, : -(-length // BLOCK_SIZE)].int()
    query = torch.randn(length, num_heads, head_dim).to(dtype)
    prompt = attend(query, caches, table, [length], [length], window, *scores)
    decoded = list(range(1, length, 13))
    alone = [attend(query[n - 1 : n], caches, table, [1], [n], window, *scores) for n in decoded]
    rows = query[[n - 1 for n in decoded]]
    together = attend(rows, caches, table.expand(len(decoded), -1), [1] * len(decoded), decoded, window, *scores)
    for row, n in enumerate(decoded):
        assert torch.equal(alone[row][0], prompt[n - 1]), f"token {n}, alone"
        assert torch.equal(together[row], prompt[n - 1]), f"token {n}, beside others"


@pytest.mark.parametrize("window", [None, 40])
def test_short_chunks_have_the_same_bits_as_a_prompt(window: int | None) -> None:
    """Short chunks are computed token by token, beside decodes."""
    length, chunks = 420, [(3, 3), (7, 130), (1, 200), (20, 300), (90, 400)]
    caches = torch.randn(2, NUM_BLOCKS, 2, BLOCK_SIZE, 64)
    table = torch.randperm(NUM_BLOCKS)[None, : -(-length // BLOCK_SIZE)].int()
    query = torch.randn(length, 4, 64)
    prompt = attend(query, caches, table, [length], [length], window)
    query_lens, seq_lens = ([chunk[column] for chunk in chunks] for column in (0, 1))
    spans = [slice(end - count, end) for count, end in chunks]
    rows = torch.cat([query[span] for span in spans])
    together = attend(rows, caches, table.expand(len(chunks), -1), query_lens, seq_lens, window)
    assert torch.equal(together, torch.cat([prompt[span] for span in spans]))


@pytest.mark.parametrize("window", [1, 16, 40, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_len", [1, 7])
def test_what_lies_before_a_window_is_not_read(query_len: int, dtype: torch.dtype, window: int) -> None:
    seq_len = 300
    caches = torch.randn(2, NUM_BLOCKS, 2, BLOCK_SIZE, 32).to(dtype)
    table = torch.arange(1, NUM_BLOCKS, dtype=torch.int32)[None]
    query = torch.randn(query_len, 2, 32)
    expected = attend(query, caches, table, [query_len], [seq_len], window)
    block, offset = divmod(seq_len - query_len - window + 1, BLOCK_SIZE)
    caches[:, : block + 1] = torch.nan
    caches[:, block + 1, :, :offset] = torch.nan
    table[:, :block] = 0
    assert torch.equal(attend(query, caches, table, [query_len], [seq_len], window), expected)


@pytest.mark.parametrize("seq_len", [3, 16, 130, 300])
def test_what_lies_behind_a_request_is_not_read(seq_len: int) -> None:
    caches = torch.randn(2, NUM_BLOCKS, 2, BLOCK_SIZE, 32)
    table, query = torch.arange(NUM_BLOCKS, dtype=torch.int32)[None], torch.randn(1, 2, 32)
    expected = attend(query, caches, table, [1], [seq_len], None)
    poisoned = caches.clone()
    poisoned[:, seq_len // BLOCK_SIZE, :, seq_len % BLOCK_SIZE :] = torch.nan
    poisoned[:, seq_len // BLOCK_SIZE + 1 :] = torch.nan
    assert torch.equal(attend(query, poisoned, table, [1], [seq_len], None), expected)
