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
from proa_engine.models.digest import weights_digest
from proa_engine.models.folders import read_config, text_fields
from proa_engine.worker.cache_plan import CachePlan

_LAYOUT_VERSION = 1  # of a page


def cache_fingerprint(
    config: EngineConfig,
    folder: Path,
    layers: Sequence[CacheLayer],
    plan: CachePlan,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> bytes:
    """Return 32 bytes that name the pages' layout and types, the weights, and what else their values depend on.

    `dtype` is that of the activations. Options that only repeat what the checkpoint asks for make no difference.
    """
    is_random = config.load_format == "dummy"
    is_quantized = text_fields(read_config(folder, config.hf_overrides)).get("quantization_config")
    parts = (
        _LAYOUT_VERSION,
        BLOCK_HASH_VERSION,
        root_hash(config.model, config.revision or ""),
        (config.seed, (folder / "config.json").read_text()) if is_random else weights_digest(folder),
        [(type(layer).__name__, astuple(layer)) for layer in layers],
        astuple(plan),
        (dtype, cache_dtype),
        (None if is_quantized else config.quantization, config.batch_invariant),
        (config.tensor_parallel_size, config.enable_expert_parallel),  # ranks' sums and scales round differently
        *([json.dumps(config.hf_overrides, sort_keys=True)] if config.hf_overrides else []),
    )
    return hashlib.sha256(repr(parts).encode()).digest()
