"""One rank of a tensor parallel model as a process: load its shard, run a prompt, save the results for a test."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from proa_engine.config import LoadFormat
from proa_engine.core.types import ImageSpan
from proa_engine.layers.mlp import GatedMLP
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.base import ImageReader
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.loader import load_model
from support.paged_model import CachedSequence, EncodedImage, PagedModel

RankResult = tuple[torch.Tensor, dict[str, tuple[int, ...]]]  # logits; shapes by name


def run_rank(
    rank: int, world_size: int, meeting: Path, folders: list[Path], load_format: LoadFormat, out: Path
) -> None:
    """Write `out`/rank.pt: for each folder the logits of a fixed prompt, with an image for models that read them, and
    the shapes of what this rank holds."""
    torch.set_num_threads(1)
    group = None
    if world_size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name may not resolve
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
        group = dist.group.WORLD
    results = [run_model(folder, load_format, ParallelContext(rank, world_size, group)) for folder in folders]
    torch.save(results, out / f"{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()


def run_model(folder: Path, load_format: LoadFormat, parallel: ParallelContext) -> RankResult:
    config = ModelConfig.from_folder(folder)
    model = load_model(
        folder,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=parallel,
        load_format=load_format,
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
        sequence.images = [EncodedImage(ImageSpan(b"", 10, len(embeddings), height, width), embeddings)]
    batch = PagedModel(model, image_config=config.images)
    hidden = torch.cat([batch.step([(sequence, num_tokens)])[0] for num_tokens in (33, 33, 34)])
    # A CPU's products have a shape.
    layer: Any = next(layer for layer in model.layers if hasattr(getattr(layer, "attention", None), "qkv"))
    head: Any = model.lm_head
    shapes = {
        "qkv": tuple(layer.attention.qkv.linear.shape),
        "o": tuple(layer.attention.output.partial.shape),
        "embedding": tuple(model.embedding.rows.shape),
        "lm_head": tuple(head.linear.shape),
        "kv_heads": (layer.attention.num_kv_heads,),
    }
    if isinstance(layer.mlp, GatedMLP):
        mlp: Any = layer.mlp
        shapes |= {"gate_up": tuple(mlp.gate_up.linear.shape), "down": tuple(mlp.down.partial.shape)}
    return model.compute_logits(hidden), shapes
