"""Resolve the settings that EngineConfig leaves open ("auto", None) from the model and the machine."""

from dataclasses import replace
from pathlib import Path

import torch

from proa_engine.config import FITTING_LENGTH, EngineConfig
from proa_engine.kernels.fp8 import FP8, check_device
from proa_engine.layers.cache_layers import LatentLayer
from proa_engine.memory.host import available_cores, threads_per_rank
from proa_engine.memory.requirements import check_max_model_len
from proa_engine.models import read_config
from proa_engine.models.config import (
    ModelConfig,
    check_prompt_embeds,
    check_reads_audio,
    make_batch_invariant,
    make_expert_parallel,
)
from proa_engine.models.pooling_config import changed_pooling


def resolve_device(wanted: str, rank: int) -> torch.device:
    """Return the device of a rank, counted from this machine's first. Raises `ValueError` if the machine does not have
    it."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and rank >= (count := torch.cuda.device_count()):
        raise ValueError(f"device cuda needs {rank + 1} GPUs, and torch {torch.__version__} finds {count} here")
    return torch.device(wanted, rank) if wanted == "cuda" else torch.device(wanted)


def limit_torch_threads(num_ranks: int) -> None:
    """Lower torch's thread count to this rank's share of the cores, where torch was imported before it could be set."""
    threads = threads_per_rank(num_ranks, available_cores())
    if torch.get_num_threads() > threads:
        torch.set_num_threads(threads)


def resolve_model_config(config: EngineConfig, folder: Path, device: torch.device) -> ModelConfig:
    """Return the configuration of the model in `folder`, changed as the engine needs it: its pooling task, kernels that
    do not depend on the batch, and `max_model_len` as the number of positions."""
    model = read_config.of_engine(config, folder, language_model_only=config.images.language_model_only)
    if config.pooler_config is not None:
        model = replace(model, pooling=changed_pooling(model.pooling, config.pooler_config))
    if config.batch_invariant and device.type != "cpu":  # kernels of a CPU never depend on the batch
        model = make_batch_invariant(model, config.parallel.tensor_parallel_size)
    is_latent = all(kind is LatentLayer for layer in model.layers for kind in layer.cache_kinds)
    if config.parallel.decode_context_parallel_size > 1 and not is_latent:
        raise ValueError("decode_context_parallel_size must be 1 for a model that has layers without latent attention")
    check_reads_audio(model)
    if config.enable_prompt_embeds:
        check_prompt_embeds(model)
    if config.parallel.enable_expert_parallel:
        model = make_expert_parallel(model)
    return replace(model, max_position_embeddings=resolve_max_model_len(config, model))


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the maximum number of tokens of a request; of `FITTING_LENGTH`, before there is a KV cache. Raises
    `ValueError` if `config.max_model_len` exceeds the model's positions, or the tokens of a step if the model is an
    encoder, whose prompts are computed in one step."""
    most = model.max_position_embeddings
    if model.is_encoder and config.max_num_batched_tokens < most:
        most = config.max_num_batched_tokens
        if config.max_model_len is not None and config.max_model_len > most:
            raise ValueError(
                f"max_model_len {config.max_model_len} of an encoder exceeds max_num_batched_tokens {most}"
            )
    if config.max_model_len in (None, FITTING_LENGTH):
        return most
    check_max_model_len(config.max_model_len, most)
    return config.max_model_len


def resolve_dtype(wanted: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the type of weights and activations. "auto" is float32 on a CPU, which is the fastest there."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else model.torch_dtype
    dtype: torch.dtype = getattr(torch, wanted)  # torch has all of the names, `float` and `half` among them
    return dtype


def resolve_cache_dtype(wanted: str, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of the KV cache. `dtype` is the type of the activations.

    "auto" is what the checkpoint asks for; latent attention has no cache of 8-bit floats. Raises ValueError for a type
    of floats that is not that of the activations, and for 8-bit floats on a GPU that has none.
    """
    cache_dtype = _cache_dtype(wanted, model, dtype)
    if cache_dtype == FP8:
        check_device(device)
    return cache_dtype


def _cache_dtype(wanted: str, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    if wanted == "auto":
        has_latents = any(LatentLayer in layer.cache_kinds for layer in model.layers)
        return FP8 if model.fp8_kv_cache and not has_latents else dtype
    if wanted.startswith("fp8"):
        return FP8
    activations = str(dtype).removeprefix("torch.")
    if wanted != activations:
        raise ValueError(
            f"kv_cache_dtype {wanted} does not fit activations of {activations}; supported: auto, fp8, or the type of "
            "the activations (dtype)"
        )
    return dtype
