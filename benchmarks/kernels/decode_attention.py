"""Attention of decodes on a GPU, one layer of real models alone: the tiling in use, other tiles, and other numbers of
programs among which the contexts are split.

    PYTHONPATH=tests python -m benchmarks.kernels.decode_attention --workloads Llama-3.1-8B --json FILE

Figures are of one launch within a CUDA graph, with caches in so many copies that none is found in the L2 cache. The
plan, which a step makes once for all layers, is not timed. The share is of an H200's bandwidth for the keys and values.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.sweep import BANDWIDTH, num_copies, run_sweep, time_each
from proa_engine.kernels.attention import decode_attention, decode_plan
from support.paged_model import attention_metadata

HEADS = {"Llama-3.1-8B": (32, 8), "Qwen3-0.6B": (16, 8), "Qwen3-30B-A3B": (32, 4)}  # query heads, KV heads
HEAD_DIM, BLOCK_SIZE = 128, 16
BATCHES = (*((rows, 584) for rows in (1, 8, 32, 64, 128, 256)), (1, 8192), (8, 8192))  # rows, tokens of each
SMALL = ((3, 70),)


@dataclass(frozen=True, slots=True)
class Way:
    """`tile`: tokens; None: as many as in use. `programs`: of a multiprocessor."""

    tile: int | None = None
    programs: int = decode_plan.PROGRAMS_PER_MULTIPROCESSOR

    def __str__(self) -> str:
        tile = [] if self.tile is None else [f"tiles of {self.tile}"]
        programs = [] if self.programs == decode_plan.PROGRAMS_PER_MULTIPROCESSOR else [f"{self.programs} programs"]
        return ", ".join([*tile, *programs]) or "in use"


WAYS = [Way(), Way(tile=32), Way(tile=128), Way(programs=1), Way(programs=4), Way(tile=32, programs=4)]


def time_batches(model: str, batches: Sequence[tuple[int, int]], ways: Sequence[Way]) -> Iterator[dict[str, Any]]:
    num_heads, num_kv_heads = HEADS[model]
    for rows, tokens in batches:
        num_bytes = 2 * rows * tokens * num_kv_heads * HEAD_DIM * 2  # keys and values of 16 bits
        for way in ways:
            with ExitStack() as stack:
                for change in changes(way):
                    stack.enter_context(change)
                launches = attention(num_heads, num_kv_heads, rows, tokens, num_copies(num_bytes))
                try:
                    launches[0]()  # compiles
                    seconds = time_each(launches)
                except OutOfResources:
                    continue
            yield {
                "decodes": f"{rows} of {tokens}",
                "way": str(way),
                "µs": round(seconds * 1e6, 1),
                "GB/s": round(num_bytes / seconds / 1e9),
                "share": f"{num_bytes / seconds / BANDWIDTH:.0%}",
            }


def changes(way: Way) -> Iterator[Any]:
    """Patches of the modules that choose."""
    yield mock.patch.object(decode_plan, "PROGRAMS_PER_MULTIPROCESSOR", way.programs)
    if way.tile is not None:
        yield mock.patch.object(decode_attention, "_tile", return_value=way.tile)


def attention(num_heads: int, num_kv_heads: int, rows: int, tokens: int, copies: int) -> list[Callable[[], None]]:
    """What launches the attention of such a batch, with each copy of the caches."""
    device = torch.get_default_device()
    blocks_each = -(-tokens // BLOCK_SIZE)
    blocks = random.Random(0).sample(range(rows * blocks_each), rows * blocks_each)
    tables = [blocks[index * blocks_each : (index + 1) * blocks_each] for index in range(rows)]
    with torch.device("cpu"):
        metadata = attention_metadata([1] * rows, [tokens] * rows, tables, BLOCK_SIZE, device)
    plan = decode_plan.plan_decodes(metadata.seq_lens, rows, num_kv_heads, None)
    query = torch.randn(rows, num_heads, HEAD_DIM, dtype=torch.bfloat16)
    out = torch.empty_like(query)
    table = metadata.tables[0].block_table

    def launch(caches: torch.Tensor) -> Callable[[], None]:
        return lambda: decode_attention.decode_attention(query, caches[0], caches[1], table, out, plan, HEAD_DIM**-0.5)

    shape = 2, len(blocks), num_kv_heads, BLOCK_SIZE, HEAD_DIM
    return [launch(torch.randn(*shape, dtype=torch.bfloat16)) for _ in range(copies)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--small", action="store_true", help="few tokens, in Triton's interpreter too (no GPU)")
    parser.add_argument("--json", type=Path)
    return parser


def main(argv: Sequence[str]) -> None:
    arguments = parser().parse_args(argv)
    batches, ways = (SMALL, WAYS[-1:]) if arguments.small else (BATCHES, WAYS)
    with torch.inference_mode(), torch.device("cpu" if arguments.small else "cuda"):
        run_sweep(arguments.workloads, lambda model: time_batches(model, batches, ways), arguments.json)


if __name__ == "__main__":
    main(sys.argv[1:])
