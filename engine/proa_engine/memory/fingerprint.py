"""The fingerprint of an engine's KV cache: engines with the same one compute blocks that each of them can use."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import torch

from proa.blocks import BLOCK_HASH_VERSION, root_hash
from proa_engine.config import EngineConfig
from proa_engine.layers.cache_layers import CacheLayer
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory.cache_plan import CachePlan
from proa_engine.sources.folders import MODELOPT_FILE, read_config, read_file, text_fields

_LAYOUT_VERSION = 1  # of a page


def digest_of_ranks(own: bytes, parallel: ParallelContext, device: torch.device) -> bytes:
    """Return the digest of what all tensor parallel ranks have loaded, the same on each, from the digest of what this
    rank has. Every rank must call it."""
    ranks = parallel.all_gather_last_dim(torch.tensor(list(own), dtype=torch.uint8, device=device))
    return hashlib.sha256(bytes(ranks.tolist())).digest()


def cache_fingerprint(
    config: EngineConfig,
    folder: Path,
    weights: bytes,
    layers: Sequence[CacheLayer],
    plan: CachePlan,
    *,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_positions: int,
    device: torch.device,
) -> bytes:
    """Return 32 bytes that name the pages' layout and types, the weights, and what else their values depend on.

    `weights` is the digest of what all ranks have loaded from `folder`, without a meaning for dummy weights. `dtype` is
    that of the activations. Options that only repeat what the checkpoint asks for make no difference.
    """
    fields = text_fields(read_config(folder, config.hf_overrides))
    parts = (
        _LAYOUT_VERSION,
        BLOCK_HASH_VERSION,
        root_hash(config.model, config.revision or ""),
        _dummy_weights(config, device) if config.load_format == "dummy" else weights,
        [read_file(folder / name) for name in ("config.json", MODELOPT_FILE)],
        [(type(layer).__name__, astuple(layer)) for layer in layers],
        astuple(plan),
        (dtype, cache_dtype),
        (None if fields.get("quantization_config") else config.quantization, config.batch_invariant),
        # The sums and scales of ranks round differently.
        (config.parallel.tensor_parallel_size, config.parallel.enable_expert_parallel),
        num_positions if "long_factor" in json.dumps(fields) else None,  # LongRoPE chooses its factors by them
        *([json.dumps(config.hf_overrides, sort_keys=True)] if config.hf_overrides else []),
    )
    return hashlib.sha256(repr(parts).encode()).digest()


def _dummy_weights(config: EngineConfig, device: torch.device) -> tuple[object, ...]:
    """Return what random weights depend on: another kind of device or another torch draws others from the same
    seed."""
    if device.type == "cuda":
        return config.seed, torch.__version__, torch.cuda.get_device_name(device)
    return config.seed, torch.__version__, device.type, torch.backends.cpu.get_cpu_capability()
