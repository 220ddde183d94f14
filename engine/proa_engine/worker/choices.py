"""Choices: what the configuration leaves open, decided from the model and the machine."""

import torch

from proa_engine.config import EngineConfig
from proa_engine.models.config import ModelConfig
from proa_engine.worker.host import available_cores, threads_per_rank


def choose_device(wanted: str, rank: int) -> torch.device:
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted, rank) if wanted == "cuda" else torch.device(wanted)


def limit_torch_threads(num_ranks: int) -> None:
    """For a torch that was imported before its thread count could be set; never raises the count."""
    threads = threads_per_rank(num_ranks, available_cores())
    if torch.get_num_threads() > threads:
        torch.set_num_threads(threads)


def choose_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Raises `ValueError` where more is asked for than the model's positions reach."""
    most = model.max_position_embeddings
    if config.max_model_len is None:
        return most
    if config.max_model_len > most:
        raise ValueError(f"max_model_len {config.max_model_len} is more than the model's {most} positions")
    return config.max_model_len


def choose_dtype(wanted: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Of weights and activations. float32 is what CPUs are fast at; a GPU takes what the weights are in."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else model.torch_dtype
    dtype: torch.dtype = getattr(torch, wanted)  # which has the same names, `float` and `half` among them
    return dtype


def choose_cache_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype` is that of activations."""
    return dtype if wanted == "auto" else torch.float8_e4m3fn


def num_parameters(model: ModelConfig) -> int:
    """Near enough for all architectures here: embeddings and matrices, without norms and biases."""
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    total = embeddings + model.num_layers * (attention + mlp)
    if model.moe is None:
        return total
    experts = 3 * model.hidden_size * model.moe.intermediate_size * model.moe.num_experts
    return total + len(model.moe.layers) * (experts - mlp)


def cpu_workspace(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """What a step of the full budget takes at its peak: some activations a token, some copies of the logits a row."""
    per_token = (6 * model.hidden_size + 3 * model.intermediate_size) * dtype.itemsize
    per_row = 6 * model.vocab_size * 4
    most_rows = config.max_num_seqs * (1 + config.num_speculative_tokens)
    return config.max_num_batched_tokens * per_token + most_rows * per_row
