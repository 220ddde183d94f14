"""How many KV cache blocks fit into memory: arithmetic on byte counts, and errors that name what to change."""

from dataclasses import dataclass

from proa_engine.config import EngineConfig
from proa_engine.models.config import ModelConfig
from proa_engine.worker.host import HostMemory

# Share of the machine's available memory to use where there is no container limit: other programs need some too.
_SHARE_OF_MACHINE = 0.5


@dataclass(frozen=True, slots=True)
class WorkerSizes:
    """What one rank holds, in bytes, and how many KV cache blocks fit beside it."""

    num_blocks: int
    block_bytes: int  # of one block on this rank, all layers together
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes of the KV cache on one rank."""

    block_size: int  # tokens
    block_bytes: int  # of one block, all layers together
    max_model_len: int
    max_num_seqs: int

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def max_useful_blocks(self) -> int:
        """Blocks with which every slot can hold a request of `max_model_len` tokens."""
        return self.blocks_per_request * self.max_num_seqs


def configured_blocks(config: EngineConfig, layout: CacheLayout) -> int | None:
    """The number of blocks that `config` sets, directly or in bytes; None where it sets neither."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // layout.block_bytes
    return None


def cpu_budget(memory: HostMemory, *, utilization: float, ranks_here: int, workspace: int) -> int:
    """Bytes for one rank's KV cache on a CPU, where `ranks_here` ranks share the container or machine.

    `workspace` is the peak memory of a step, in bytes. Negative if the rest takes more than there is.
    """
    if memory.limit is None:
        return int(memory.available * _SHARE_OF_MACHINE) // ranks_here - workspace
    share = int(memory.limit * utilization) // ranks_here - memory.process
    return min(share, memory.available // ranks_here) - workspace


def cpu_workspace(config: EngineConfig, model: ModelConfig, dtype_bytes: int) -> int:
    """Estimated peak bytes of a step of the full token budget: activations per token, copies of the logits per row."""
    inner_size = max(layer.mlp.inner_size for layer in model.layers)
    per_token = (6 * model.hidden_size + 3 * inner_size) * dtype_bytes
    per_row = 6 * model.vocab_size * 4
    max_rows = config.max_num_seqs * (1 + config.num_speculative_tokens)
    return config.max_num_batched_tokens * per_token + max_rows * per_row


def num_parameters(model: ModelConfig) -> int:
    """Estimated number of parameters: embeddings and matrices, without norms and biases."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return embeddings + sum(layer.num_parameters(model.hidden_size) for layer in model.layers)


def check_room(num_blocks: int, layout: CacheLayout) -> None:
    """Raise `ValueError` unless one request of `max_model_len` tokens fits into `num_blocks` blocks."""
    needed = layout.blocks_per_request
    if num_blocks >= needed:
        return
    longest = max(num_blocks, 0) * layout.block_size
    shorter = f"lower max_model_len to at most {longest}" if longest else "take a smaller model"
    raise ValueError(
        f"the KV cache has room for {max(num_blocks, 0)} blocks, but one request of max_model_len "
        f"{layout.max_model_len} tokens needs {needed} ({_gib(needed * layout.block_bytes)} on this rank): {shorter}, "
        "raise kv_cache_memory_bytes (num_gpu_blocks_override, gpu_memory_utilization), or give the engine more memory"
    )


def weights_room(memory: HostMemory, ranks_here: int) -> int:
    """Bytes that one rank's weights may take on a CPU, where `ranks_here` ranks share the container or machine.

    `memory` is the state before any rank has loaded weights.
    """
    limit = memory.available if memory.limit is None else min(memory.limit, memory.available)
    return limit // ranks_here


def check_weights(weight_bytes: int, room: int) -> None:
    """Raise `ValueError` if the weights take more than `room` bytes."""
    if weight_bytes > room:
        raise ValueError(
            f"the model's weights take {_gib(weight_bytes)} on this rank, but it has {_gib(room)} of memory: give the "
            "engine more, take a smaller dtype or a smaller model, or more ranks in containers of their own "
            "(tensor_parallel_size)"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
