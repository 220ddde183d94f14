"""Attention: its plan of decodes, decodes and prompts, and what is rotated and written to the cache."""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from proa_engine.kernels.attention import decode_attention, prefill_attention
from proa_engine.kernels.attention.decode_plan import DecodePlan
from proa_engine.kernels.attention.paged_attention import paged_attention, plan_attention
from support.interpreter import ordered_sums
from support.kernel_cases import attend, attention_case, dense_attention, padded_case, plan_of, with_padding
from support.kernels.case import (
    Property,
    Shape,
    close,
    equal,
    grid,
    holds,
    patched_tiles,
    turns,
)

Sizes = dict[str, Any]
SIZES: list[Sizes] = [
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 20, "block_size": 4},
    {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8},
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "has_sinks": True, "is_strided": True},
    {"num_heads": 2, "num_kv_heads": 1, "head_dim": 12, "has_sinks": True, "soft_cap": 2.0},
]
WIDE_HEADS: Sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 136}  # have tiles of their own
SIZES_OF_GPUS: list[Sizes] = [
    {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
    {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    {"num_heads": 14, "num_kv_heads": 2, "head_dim": 64},
    {"num_heads": 7, "num_kv_heads": 1, "head_dim": 64, "block_size": 8},
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 80},
    {"num_heads": 40, "num_kv_heads": 2, "head_dim": 96, "block_size": 32},
    {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256},
    {"num_heads": 16, "num_kv_heads": 2, "head_dim": 512, "is_strided": True},
    {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "has_sinks": True},
    {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "soft_cap": 5.0},
]
LONG_SIZES: list[Sizes] = [
    {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "is_strided": True},
    {"num_heads": 7, "num_kv_heads": 1, "head_dim": 128, "block_size": 32, "has_sinks": True},
    {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "has_sinks": True},
    {"num_heads": 6, "num_kv_heads": 6, "head_dim": 64, "block_size": 64},
]
MANY_HEADS: Sizes = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128}
SMALL_TILE = 16 * 16  # of a program's queries
Lens = Sequence[tuple[int, int]]  # query tokens and all tokens of requests


def decodes(width: int, lengths: Iterable[int]) -> Lens:
    return tuple((width, length) for length in lengths)


def lens_at_random(seed: int) -> Lens:
    rows = random.Random(seed)
    lens = [(1, rows.choice([1, 16, 17, rows.randint(1, 3000)])) for _ in range(rows.randint(0, 12))]
    for _ in range(rows.randint(0 if lens else 1, 4)):
        query_len = rows.randint(2, 300)
        lens.append((query_len, query_len + rows.choice([0, 1, rows.randint(0, 900)])))
    return tuple(lens)


def check_attention(
    dtype: torch.dtype,
    device: str,
    lens: Lens,
    sizes: Sizes,
    *,
    width: int = 1,
    is_padded: bool = False,
    num_padding: int = 0,
    window: int | None = None,
    scale: float = 0.25,
    images: Sequence[tuple[int, int, int]] = (),
    causal: bool = True,
    batch_invariant: bool = False,
    has_slots: bool = True,
    max_tile: int = decode_attention.MAX_TILE,
    split_row: int | None = None,
    layers: int = 1,
) -> None:
    """`is_padded`: all requests are decodes of `width` tokens, some of padding; behind them are `num_padding` rows
    without a request. `split_row` has several splits. `layers` share a plan, and have the same bits."""
    case = attention_case(
        list(lens), window=window, scale=scale, images=images, causal=causal, dtype=dtype, device=device, **sizes
    )
    if is_padded:
        case = padded_case(case, width)
    is_compared = torch.ones(len(case.query) + num_padding * width, dtype=torch.bool)
    if is_padded and not causal:  # the padding attends too
        is_compared[: len(case.query)] = case.metadata.tables[0].slot_mapping.cpu() >= 0
    case = with_padding(case, num_padding, width)
    plan = plan_of(case, window, width, causal=causal, batch_invariant=batch_invariant, has_slots=has_slots)
    if split_row is not None:
        assert isinstance(plan, DecodePlan)
        assert (plan.items[0] == split_row).sum() > 1
    with mock.patch.object(decode_attention, "MAX_TILE", max_tile):
        first = None
        for _ in range(layers):
            out = attend(case, window, scale, width, plan=plan)
            assert not out.isnan().any()
            close(out[is_compared], case.expected[is_compared])
            if num_padding:
                assert (out[-num_padding * width :] == 0).all()
            first = out if first is None else first
            equal(out, first)


def on_gpus(lens: Lens, windows: Sequence[int | None] = (None,), **options: Any) -> list[Shape]:
    return [{"lens": lens, "scale": 0.1, **options, **each} for each in grid(sizes=SIZES_OF_GPUS, window=windows)]


def wide_decodes(width: int, lengths: Sequence[int], sizes: Sizes, **options: Any) -> list[Shape]:
    """As wide as one program computes and wider; with splits that begin behind some of a row's query tokens, with rows
    of padding, and with tokens of padding before a request's beginning."""
    common = {"sizes": sizes, "width": width, "has_slots": False, **options}
    return [
        {"lens": decodes(width, lengths), "num_padding": 1, "layers": 2, **common},
        *grid([{"lens": decodes(2, (2, 2)), "is_padded": True, **common}], batch_invariant=(False, True)),
    ]


def decodes_at_the_ends_of_tiles(tile: int, sizes: Sizes) -> Shape:
    """Rows that end at, before and behind the end of a block and of a tile. Parts of one token are among them."""
    ends = {1, 2, *(block + n for block in (sizes.get("block_size", 16), tile, 2 * tile, 128) for n in (-1, 0, 1))}
    return {"lens": decodes(1, sorted(ends)), "sizes": sizes, "num_padding": 2}


BLOCKS = (1, 1), (2, 40), (3, 150), (5, 129), (5, 5)
ATTENTION = Property(
    hold=check_attention,
    interpreted=[
        *(
            {**each, "lens": decodes(1, (1, 16, 37, 300, 129)), "num_padding": 2, "layers": 2}
            | ({} if each["window"] else {"split_row": 3})
            for each in turns(sizes=SIZES, window=(None, 140))
        ),
        *(decodes_at_the_ends_of_tiles(64, {**SIZES[0], "block_size": block_size}) for block_size in (4, 16, 64, 128)),
        *(
            decodes_at_the_ends_of_tiles(tile, {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim})
            for tile, head_dim in ((32, 128), (16, 136))
        ),
        *wide_decodes(3, (3, 16, 150, 129), SIZES[0]),
        *wide_decodes(3, (63, 64, 65, 66, 67), SIZES[0]),
        *wide_decodes(5, (200, 141, 5), SIZES[1], window=140),
        *wide_decodes(2, (130, 300), SIZES[3]),
        *wide_decodes(19, (19, 131), SIZES[2], max_tile=SMALL_TILE),
        *(
            {"lens": BLOCKS, "sizes": sizes, "max_tile": tile, "split_row": 2}
            | {"width": 5, "is_padded": True, "num_padding": 1, "causal": False, "has_slots": False, "layers": 2}
            for sizes, tile in zip(SIZES, itertools.cycle((decode_attention.MAX_TILE, SMALL_TILE)), strict=False)
        ),
        *grid(  # a row's padding does not attend to keys before its own query tokens' window
            [{"lens": ((1, 40), (3, 150), (2, 2), (5, 31)), "width": 5, "is_padded": True}],
            sizes=SIZES[:2],
            window=(2, 20),
            batch_invariant=(False, True),
        ),
        *grid(
            [{"lens": ((1, 37), (1, 5), (9, 40)), "scale": 0.1}],
            sizes=[{"head_dim": head_dim} for head_dim in (80, 112, 192, 256, 512)],
        ),
    ],
    gpu=[
        *(shape for seed in range(3) for shape in on_gpus(lens_at_random(seed), (None, 100))),
        *(
            shape
            for width in (2, 5, 33)  # 20 layers, because the split that finishes last varies
            for shape in on_gpus(
                decodes(width, [width + n for n in (0, 1, 16, 2900, 127, 128, 640)]),
                (None, 100),
                width=width,
                layers=20,
            )
        ),
        *on_gpus(((1, 40), (3, 1500), (2, 2), (5, 31), (4, 2900)), (1, 100, 1000), width=5, is_padded=True),
        *on_gpus(  # as Gemma 3's images of 256 tokens: side by side, and behind a hit within one, of one token too
            ((1, 900), (1, 256), (256, 256), (700, 1500), (300, 301)),
            (None, 100, 1024),
            images=((1, 0, 256), (2, 0, 256), (3, 700, 956), (3, 956, 1212), (4, 0, 256)),
        ),
        *(
            {"lens": decodes(width, (width, 127, 129, 5000, 900)), "sizes": MANY_HEADS, "width": width, "causal": False}
            for width in (2, 16)
        ),
    ],
)
LONG_AND_SHORT_PROMPTS = Property(  # the tilings of Hopper's kernel
    hold=check_attention,
    gpu=grid(
        [{"scale": 0.1, "layers": 2}],
        lens=(
            ((4099, 4099),),
            ((4096, 4200), (4500, 6001)),
            ((1, 5), (1, 3000), (7, 7), (300, 4001)),
        ),
        sizes=LONG_SIZES,
        window=(None, 100, 3000),
    ),
    dtypes=(torch.bfloat16, torch.float16),
)


@holds(
    interpreted=[
        *(
            {**each, "lens": ((1, 33), (1, 5), (3, 3), (20, 50), (70, 90))}
            for each in turns(sizes=(*SIZES, WIDE_HEADS), window=(None, 18), num_decodes=(0, 2))
        ),
        *grid(  # with the tilings of GPUs whose shared memory has no room for wide tiles
            [{"lens": ((3, 3), (20, 50)), "tiles": 89}],
            sizes=[{"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim} for head_dim in (136, 264)],
        ),
        *(  # a chunk behind a hit within an image, of one token too; images side by side, and wider than a window
            {"lens": ((1, 33), (1, 5), (3, 3), (20, 50)), "sizes": sizes, "window": window, "num_decodes": 2}
            | {"images": ((1, 2, 5), (2, 0, 3), (3, 16, 38), (3, 38, 49))}
            for sizes, window in zip(SIZES[:2], (None, 18), strict=True)
        ),
    ]
)
def prompts(
    dtype: torch.dtype,
    device: str,
    lens: Lens,
    sizes: Sizes,
    *,
    window: int | None = None,
    num_decodes: int = 0,
    images: Sequence[tuple[int, int, int]] = (),
    tiles: int | None = None,
) -> None:
    """By the kernel of prompts, which leaves decodes alone."""
    case = attention_case(list(lens), window=window, images=images, dtype=dtype, **sizes)
    out, metadata = torch.full_like(case.query, torch.nan), case.metadata
    tensors = case.query, case.key_cache, case.value_cache, metadata.query_start_loc, metadata.seq_lens
    table = metadata.tables[0].block_table
    with patched_tiles(prefill_attention, tiles):
        prefill_attention.prefill_attention(
            *tensors, table, out, num_decodes, 0.25, window, ends=metadata.ends, **case.scores
        )
    close(out[num_decodes:], case.expected[num_decodes:])
    assert out[:num_decodes].isnan().all()


@holds(gpu=[*on_gpus(((1, 40), (33, 50), (2, 600)), (None, 100))])
def padding_of_prompts_and_empty_requests(
    dtype: torch.dtype, device: str, lens: Lens, sizes: Sizes, window: int | None, scale: float
) -> None:
    """As steps whose graphs are captured: empty requests behind the decodes and behind the prompts, then padding."""
    case = attention_case(list(lens), window=window, scale=scale, dtype=dtype, device=device, **sizes)
    num_padding, metadata = 75, case.metadata
    rows = torch.tensor([0, 1, 1, 2, 2, 2], device=device)
    table = replace(metadata.tables[0], block_table=metadata.tables[0].block_table[rows])
    starts, seq_lens = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in ([0, 1, 1, 34, 36, 36, 36 + num_padding], [40, 0, 50, 600, 0, 0])
    )
    metadata = replace(metadata, query_start_loc=starts, seq_lens=seq_lens, tables=(table,))
    padding = torch.randn(num_padding, *case.query.shape[1:], dtype=dtype, device=device)
    ours = attend(replace(case, query=torch.cat((case.query, padding)), metadata=metadata), window, scale)
    close(ours[:-num_padding], case.expected)
    assert not ours[-num_padding:].any()


@holds(gpu=[{"query_len": 1}, {"query_len": 33}], dtypes=(torch.bfloat16,))
def context_of_128k_tokens(dtype: torch.dtype, device: str, query_len: int) -> None:
    length, block_size = 131_072, 16
    key, value = torch.randn(2, length, 2, 128, device=device).to(dtype)
    query = torch.randn(query_len, 8, 128, device=device).to(dtype)
    blocks = torch.randperm(length // block_size, device=device)
    caches = torch.empty(2, len(blocks), 2, block_size, 128, dtype=dtype, device=device)
    for cache, tokens in zip(caches, (key, value), strict=True):
        cache[blocks] = tokens.view(-1, block_size, 2, 128).transpose(1, 2)
    starts, seq_lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, query_len], [length]))
    batch, num_decodes = (starts, seq_lens, blocks[None].int()), int(query_len == 1)
    plan = plan_attention(*batch, num_decodes, caches[0].shape, None)
    out = paged_attention(query, caches[0], caches[1], *batch, plan, num_decodes=num_decodes, scale=0.1)
    close(out, dense_attention(query, key, value, 0.1, None))


@holds(
    interpreted=[
        {"length": 90, "sizes": SIZES[0], "has_image": True},
        {"length": 90, "sizes": SIZES[1], "window": 40},
        {"length": 90, "sizes": WIDE_HEADS},
        {"length": 70, "sizes": SIZES[0], "has_scores": True},
    ],
    gpu=grid(
        [{"length": 1000}],
        sizes=[
            dict(zip(("num_heads", "num_kv_heads", "head_dim", "block_size"), each, strict=True))
            for each in (
                *((32, 8, 128, 16), (16, 8, 128, 16), (14, 2, 64, 16), (4, 4, 80, 8), (40, 2, 96, 32)),
                *((8, 4, 256, 16), (16, 2, 512, 16)),
            )
        ],
        window=(None, 100),
        has_image=(False, True),
    ),
)
def invariant_attention(
    dtype: torch.dtype,
    device: str,
    length: int,
    sizes: Sizes,
    *,
    window: int | None = None,
    has_scores: bool = False,
    has_image: bool = False,
) -> None:
    """Attention of a sequence's tokens has its bits as one prompt, in chunks and as decodes, alone and in a batch.

    `has_image`: the second chunk ends with an image, and so does the second decode.
    """
    middle, block_size, heads = length // 2 + 1, sizes.get("block_size", 16), sizes["num_heads"]
    ends = torch.arange(1, length + 1, dtype=torch.int32, device=device)
    if has_image:
        ends[length // 3 + 2 : middle] = middle
    query = torch.randn(length, heads, sizes["head_dim"]).to(dtype).to(device)
    num_blocks = -(-length // block_size)
    table = torch.randperm(num_blocks, dtype=torch.int32).to(device)
    shape = 2, num_blocks, sizes["num_kv_heads"], block_size, sizes["head_dim"]
    caches = torch.randn(shape).to(dtype).to(device)
    scores: dict[str, Any] = {"sinks": torch.randn(heads).to(device), "soft_cap": 2.0} if has_scores else {}

    def attend_to(parts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A batch of requests that each compute the tokens first … past - 1 of the sequence."""
        rows = torch.cat([query[first % length :][: past - first] for first, past in parts])
        starts = torch.tensor([0, *(past - first for first, past in parts)]).cumsum(0).int().to(device)
        lens = torch.tensor([past for _, past in parts], dtype=torch.int32, device=device)
        tensors = rows, caches[0], caches[1], starts, lens, table.expand(len(parts), -1).contiguous()
        out = torch.full_like(rows, torch.nan)
        of_image = torch.cat([ends[first % length :][: past - first] for first, past in parts]) if has_image else None
        prefill_attention.prefill_attention(
            *tensors, out, 0, 0.25, window, batch_invariant=True, ends=of_image, **scores
        )
        return out

    with ordered_sums(device):
        whole = attend_to([(0, length)])
        key, value = caches[:, table.long()].transpose(2, 3).flatten(1, 2)[:, :length]
        close(whole, dense_attention(query, key, value, 0.25, window, **scores, ends=ends))
        alone = [(token, token + 1) for token in (0, length // 2, length - 1)]
        chunks = [(0, length // 3), (length // 3, middle), (middle, length)]
        for parts in (*([each] for each in alone), chunks, [*alone, *chunks], [(middle - 5, middle)]):
            assert torch.equal(attend_to(parts), torch.cat([whole[first:past] for first, past in parts])), parts
        if not has_image:
            padding = (-1, 0)  # a padding row of a captured decode
            assert (attend_to([alone[1], padding])[1] == 0).all()
