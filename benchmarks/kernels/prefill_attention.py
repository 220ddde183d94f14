"""Attention of prompts on a GPU, one layer of real models alone: both tilings of Hopper's kernel, the tiling of the
kernel of other GPUs, and others.

    PYTHONPATH=tests python -m benchmarks.kernels.prefill_attention --workloads Llama-3.1-8B --json FILE

Figures are of one launch within a CUDA graph. The share is of the rate of a large bfloat16 matrix product.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.engine import engine_profile
from benchmarks.kernels.sweep import run_sweep, time_each
from proa_engine.kernels.attention import prefill_attention, prefill_hopper
from proa_engine.kernels.launch import is_hopper
from proa_engine.kernels.tilings import PrefillTile, Tilings, tilings_of
from support.paged_model import attention_metadata

HEADS = {"Llama-3.1-8B": (32, 8), "Qwen3-0.6B": (16, 8)}  # query heads, KV heads
HEAD_DIM, BLOCK_SIZE = 128, 16
SHAPES = ((1, 1024, 0), (8, 1024, 0), (1, 8192, 0), (1, 1024, 7168))  # prompts, new tokens of each, tokens before them
SMALL = ((2, 5, 0), (1, 3, 20))
TILES = [PrefillTile(*tile) for tile in ((128, 64, 8), (128, 128, 8), (128, 64, 4), (64, 64, 4), (128, 32, 8))]


def time_shapes(model: str, shapes: Sequence[tuple[int, int, int]], rate: float) -> Iterator[dict[str, Any]]:
    for prompts, new_tokens, context in shapes:
        launch = attention(*HEADS[model], prompts, new_tokens, context)
        in_use = tilings_of(torch.get_default_device()).prefill_tile(HEAD_DIM, 2, 2, batch_invariant=False)
        flops = 4.0 * HEADS[model][0] * HEAD_DIM * prompts * new_tokens * (context + (new_tokens + 1) / 2)
        for tile in dict.fromkeys((in_use, *TILES)):
            try:
                with mock.patch.object(Tilings, "prefill_tile", return_value=tile):
                    launch()  # compiles
                    seconds = time_each([launch])
            except OutOfResources:
                continue
            name = ", ".join(map(str, tile)) + (" (in use)" if tile == in_use else "")
            yield record(f"{prompts}x{new_tokens} after {context}", name, seconds, flops, rate)
        if is_hopper(torch.get_default_device()):
            launch = attention(*HEADS[model], prompts, new_tokens, context, on_hopper=True)
            for name in ("SHORT", "LONG"):
                with mock.patch.object(prefill_hopper, "choose_tiling", return_value=getattr(prefill_hopper, name)):
                    launch()
                    seconds = time_each([launch])
                yield record(f"{prompts}x{new_tokens} after {context}", f"Hopper, {name}", seconds, flops, rate)


def record(prompts: str, tiling: str, seconds: float, flops: float, rate: float) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "rows, tokens, warps": tiling,
        "µs": round(seconds * 1e6, 1),
        "TFLOP/s": round(flops / seconds / 1e12, 1),
        "share": f"{flops / seconds / rate:.0%}",
    }


def attention(
    num_heads: int, num_kv_heads: int, prompts: int, new_tokens: int, context: int, *, on_hopper: bool = False
) -> Callable[[], None]:
    """What launches the attention of such a batch."""
    device = torch.get_default_device()
    seq_len = context + new_tokens
    blocks_each = -(-seq_len // BLOCK_SIZE)
    blocks = random.Random(0).sample(range(prompts * blocks_each), prompts * blocks_each)
    tables = [blocks[index * blocks_each : (index + 1) * blocks_each] for index in range(prompts)]
    with torch.device("cpu"):
        metadata = attention_metadata([new_tokens] * prompts, [seq_len] * prompts, tables, BLOCK_SIZE, device)
    caches = torch.randn(2, len(blocks), num_kv_heads, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16)
    query = torch.randn(prompts * new_tokens, num_heads, HEAD_DIM, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    batch = metadata.query_start_loc, metadata.seq_lens, metadata.tables[0].block_table
    compute = prefill_hopper.prefill_hopper if on_hopper else prefill_attention.prefill_attention
    return lambda: compute(query, caches[0], caches[1], *batch, out, 0, HEAD_DIM**-0.5, None)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--small", action="store_true", help="few tokens, in Triton's interpreter too (no GPU)")
    parser.add_argument("--json", type=Path)
    return parser


def main(argv: Sequence[str]) -> None:
    arguments = parser().parse_args(argv)
    rate = engine_profile.card().flops_per_second
    shapes = SMALL if arguments.small else SHAPES
    with torch.inference_mode(), torch.device("cpu" if arguments.small else "cuda"):
        run_sweep(arguments.workloads, lambda model: time_shapes(model, shapes, rate), arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
