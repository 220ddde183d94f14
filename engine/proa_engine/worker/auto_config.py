"""Resolve the settings that EngineConfig leaves open ("auto", None) from the model and the machine."""

import torch

from proa_engine.config import EngineConfig
from proa_engine.models.config import ModelConfig
from proa_engine.worker.host import available_cores, threads_per_rank


def resolve_device(wanted: str, rank: int) -> torch.device:
    """Raises `ValueError` if there is no such device for this rank."""
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


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Raises `ValueError` if `config.max_model_len` is more than the model's positions, or than an encoder can compute:
    its prompts are computed in one step."""
    most = model.max_position_embeddings
    if model.is_encoder and config.max_num_batched_tokens < most:
        most = config.max_num_batched_tokens
        if config.max_model_len is not None and config.max_model_len > most:
            raise ValueError(
                f"max_model_len {config.max_model_len} of an encoder exceeds max_num_batched_tokens {most}"
            )
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise ValueError(f"max_model_len {config.max_model_len} is more than the model's {most} positions")
    return config.max_model_len


def resolve_dtype(wanted: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of weights and activations. "auto" is float32 on a CPU, which computes that fastest."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else model.torch_dtype
    dtype: torch.dtype = getattr(torch, wanted)  # torch has all of the names, `float` and `half` among them
    return dtype


def resolve_cache_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """The type of the KV cache. `dtype` is that of activations."""
    return dtype if wanted == "auto" else torch.float8_e4m3fn
