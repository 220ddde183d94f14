"""The plan of decodes, the splits of their contexts, and what their programs without work read."""

import itertools
from unittest import mock

import torch

from proa_engine.kernels import prefetch
from proa_engine.kernels.attention import decode_plan
from proa_engine.kernels.attention.decode_plan import SPLIT_MULTIPLE, plan_decodes
from proa_engine.kernels.launch import HOPPER_MULTIPROCESSORS
from support.kernel_cases import attend, attention_case
from support.kernels.attention import MANY_HEADS
from support.kernels.case import close, equal, holds, table
from support.prefetched_bytes import mark_bytes


@holds(
    interpreted=table(
        "num_rows most_tokens num_kv_heads window width",
        (1, 600, 8, None, 1),
        (3, 5000, 4, None, 5),
        (33, 200, 8, 70, 1),
        (70, 9000, 3, None, 1),
        (70, 900, 1, 140, 3),
        (600, 2000, 40, None, 1),
    ),
)
def plan_of_decodes(
    dtype: torch.dtype,
    device: str,
    num_rows: int,
    most_tokens: int,
    num_kv_heads: int,
    window: int | None,
    width: int,
) -> None:
    """Every token that a row's queries attend to is in one item, a row's items are alike, longer ones come first."""
    seq_lens = torch.randint(most_tokens, (num_rows,), dtype=torch.int32)
    seq_lens[0] = most_tokens
    seq_lens[num_rows // 2 + 1 :: 7] = 0
    with mock.patch.object(decode_plan, "num_multiprocessors", return_value=HOPPER_MULTIPROCESSORS):
        plan = plan_decodes(seq_lens, num_rows, num_kv_heads, window, width)
    assert (plan.arrived == 0).all()
    items = [item for item in zip(*plan.items.tolist(), strict=True) if item[0] >= 0]
    assert (plan.items[0, len(items) :] == -1).all()
    assert (plan.items[1, len(items) :] == len(items)).all()
    lengths = []
    for row, seq_len in enumerate(seq_lens.tolist()):
        first = 0 if window is None else max(seq_len - window - width + 1, 0) // SPLIT_MULTIPLE * SPLIT_MULTIPLE
        first_item = next(index for index, item in enumerate(items) if item[0] == row)
        num_parts = items[first_item][5]
        parts = items[first_item : first_item + num_parts]
        starts, ends = [part[1] for part in parts], [part[2] for part in parts]
        assert [item for item in items if item[0] == row] == parts
        assert {(seq_len, first_item, num_parts)} == {part[3:] for part in parts}
        assert [*starts, seq_len] == [first, *ends]
        assert all(start % SPLIT_MULTIPLE == 0 for start in starts)
        assert all(start < end for start, end in itertools.pairwise([*starts, seq_len])) or seq_len == 0
        assert len({end - start for start, end in itertools.pairwise(starts)}) <= 1
        lengths.append((first_item, starts[1] - first if num_parts > 1 else seq_len - first))
    rounded = [-(-length // SPLIT_MULTIPLE) for _, length in sorted(lengths)]
    assert rounded == sorted(rounded, reverse=True)
    assert num_rows > 9 or len(items) > num_rows


@holds(gpu=[{}])
def many_splits_equal_one(dtype: torch.dtype, device: str) -> None:
    """Repeated, because the split that finishes last varies; it merges all splits in the same order."""
    lens = [(1, n) for n in (1, 127, 128, 129, 5000, 2500, 900)]
    case = attention_case(lens, dtype=dtype, device=device, **MANY_HEADS)
    split = attend(case)
    for _ in range(200):
        equal(attend(case), split)
    with mock.patch.object(decode_plan, "SPLIT_MULTIPLE", 1 << 20):
        close(attend(case), split)


@holds(gpu=[{}], dtypes=(torch.bfloat16,))
def weights_that_programs_without_work_read_change_no_bit(dtype: torch.dtype, device: str) -> None:
    case = attention_case([(1, 600), (1, 40)], dtype=dtype, device=device, **MANY_HEADS)
    expected = attend(case)
    weights = [torch.randn(1000, size, device=device) for size in (1000, 300)]
    for most_bytes in (256, 1 << 20, 1 << 30):
        with mock.patch.object(prefetch, "MOST_BYTES", most_bytes):
            equal(attend(case, following=weights), expected)


@holds(
    interpreted=table(
        "sizes num_programs most_bytes expected",
        ((10_000,), 3, 1 << 20, (39 * 256,)),
        ((10_000,), 1, 5000, (19 * 256,)),
        ((512,), 7, 1 << 20, (512,)),
        ((10_000, 100, 2000), 3, 1 << 20, (39 * 256, 0, 7 * 256)),
        ((10_000, 5000, 2000), 2, 12_000, (39 * 256, 7 * 256, 0)),
    )
)
def prefetched_bytes(
    dtype: torch.dtype,
    device: str,
    sizes: tuple[int, ...],
    num_programs: int,
    most_bytes: int,
    expected: tuple[int, ...],
) -> None:
    """The programs' shares are whole chunks of 256 bytes of the first weights; off, there is nothing."""
    weights = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    mark_bytes(weights, num_programs, most_bytes)
    for weight, num_bytes in zip(weights, expected, strict=True):
        assert weight[:num_bytes].all()
        assert not weight[num_bytes:].any()
    assert prefetch.parts_ahead(weights) is prefetch.parts_ahead(()) is None
