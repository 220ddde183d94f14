"""Four processes that run models on one, two and four tensor parallel ranks, and save the results for a test."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from proa_engine.config import LoadFormat
from proa_engine.core.types import MediaSpan
from proa_engine.layers.experts import LatentExperts
from proa_engine.layers.mlp import GatedMLP, SparseMoE
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.side_by_side import SideBySide
from proa_engine.models import read_config
from proa_engine.models.base import ImageReader
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.loader import load_model
from support.paged_model import CachedSequence, EncodedImage, PagedModel

NUM_RANKS = 4
RankResult = tuple[torch.Tensor, dict[str, tuple[int, ...]]]  # logits; shapes by name


@dataclass(frozen=True)
class Job:
    """A model to run on 1, 2 or 4 of the 4 processes."""

    folder: Path
    num_ranks: int
    load_format: LoadFormat = "auto"
    expert_parallel: bool = False


def processes_of(jobs: Sequence[Job]) -> list[range]:
    """The processes that run each job. Jobs of fewer ranks take turns among the processes."""
    turns = dict.fromkeys((1, 2, NUM_RANKS), 0)
    found = []
    for job in jobs:
        first = turns[job.num_ranks] * job.num_ranks % NUM_RANKS
        found.append(range(first, first + job.num_ranks))
        turns[job.num_ranks] += 1
    return found


def run_rank(process: int, meeting: Path, jobs: list[Job], out: Path) -> None:
    """Write `out`/process.pt: for each job of this process the logits of a fixed prompt, with an image for models that
    read them, and the shapes of what its rank holds; None for other jobs."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name may not resolve
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=process, world_size=NUM_RANKS)
    pairs = [dist.new_group([first, first + 1]) for first in range(0, NUM_RANKS, 2)]
    groups = {1: None, 2: pairs[process // 2], NUM_RANKS: dist.group.WORLD}
    results: list[RankResult | None] = []
    for job, processes in zip(jobs, processes_of(jobs), strict=True):
        if process not in processes:
            results.append(None)
            continue
        parallel = ParallelContext(process - processes.start, job.num_ranks, groups[job.num_ranks])
        results.append(run_model(job, parallel))
    torch.save(results, out / f"{process}.pt")
    dist.destroy_process_group()


def run_jobs(jobs: list[Job], out: Path, timeout: float) -> list[list[RankResult]]:
    """Run `jobs` in one set of processes. Returns the results of each job's ranks. `timeout` is in seconds."""
    # One process imports torch, the ranks are its children.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.model_rank"])
    processes = [
        context.Process(target=run_rank, args=(number, out / "meeting", jobs, out)) for number in range(NUM_RANKS)
    ]
    deadline = time.monotonic() + timeout
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * NUM_RANKS
    results = [torch.load(out / f"{number}.pt") for number in range(NUM_RANKS)]
    return [[results[number][index] for number in each] for index, each in enumerate(processes_of(jobs))]


def run_model(job: Job, parallel: ParallelContext) -> RankResult:
    config = replace(read_config.from_folder(job.folder), expert_parallel=job.expert_parallel)
    model = load_model(
        job.folder,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=parallel,
        load_format=job.load_format,
        report=lambda line: None,
    )
    assert isinstance(model, DecoderForCausalLM)
    sequence = CachedSequence(list(range(100)))
    if config.images is not None:  # from the tenth token on
        assert isinstance(model, ImageReader)
        side = config.images.input.side
        height, width = (side, side) if side else (48, 32)
        pixels = (torch.arange(height * width * 3) % 251).to(torch.uint8).view(height, width, 3)
        embeddings = model.image_encoder(pixels)
        sequence.images = [EncodedImage(MediaSpan(b"", 10, len(embeddings), (height, width, 3)), embeddings)]
    batch = PagedModel(model, image_config=config.images)
    hidden = torch.cat([batch.step([(sequence, num_tokens)])[0] for num_tokens in (33, 33, 34)])
    head: Any = model.lm_head
    shapes = {"embedding": tuple(model.embedding.rows.shape), "lm_head": tuple(head.linear.shape)}
    for mlp in (getattr(layer, "mlp", None) for layer in model.layers):
        if isinstance(mlp, SparseMoE):
            experts: Any = mlp.experts.experts if isinstance(mlp.experts, LatentExperts) else mlp.experts
            shapes["experts"] = (experts.held.first, experts.held.size)
            if mlp.shared is not None:
                shared: Any = mlp.shared.mlp.down.partial
                shapes["shared"] = tuple(shared.shape)
    layer: Any = next((layer for layer in model.layers if hasattr(getattr(layer, "attention", None), "qkv")), None)
    if layer is None:  # latent attention
        return model.compute_logits(hidden), shapes
    shapes |= {
        "qkv": shape_of(layer.attention.qkv.linear),
        "o": tuple(layer.attention.output.partial.shape),
        "kv_heads": (layer.attention.num_kv_heads,),
    }
    if isinstance(layer.mlp, GatedMLP):
        gated: Any = layer.mlp
        shapes |= {"gate_up": shape_of(gated.gate_up.linear), "down": tuple(gated.down.partial.shape)}
    return model.compute_logits(hidden), shapes


def shape_of(product: Any) -> tuple[int, ...]:
    """Of a CPU's product."""
    if isinstance(product, SideBySide):
        shapes = [shape_of(each) for each in product.products]
        return sum(outputs for outputs, _ in shapes), shapes[0][1]
    return tuple(product.shape)
