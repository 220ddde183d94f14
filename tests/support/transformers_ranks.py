"""One of two ranks as a process: compare tiny models behind the adapter with those of `transformers`."""

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from proa_engine.layers.parallel import ParallelContext
from support.transformers_sweep import Verdict, judge

RANKS = 2


def run_rank(rank: int, types: list[str], folder: Path) -> None:
    """Write `folder`/rank.json: the outcome of each type."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name may not resolve
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    parallel = ParallelContext(rank, RANKS, dist.group.WORLD)
    verdicts: dict[str, Verdict] = {name: judge(name, parallel) for name in types}
    (folder / f"{rank}.json").write_text(json.dumps({name: verdict.text for name, verdict in verdicts.items()}))
    dist.destroy_process_group()
