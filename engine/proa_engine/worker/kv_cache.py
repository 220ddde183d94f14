"""How many KV cache blocks there is room for, and the error that says what to change when there are too few.

Arithmetic on byte counts only; where they come from (a container's limit, a GPU's profile run) is the caller's.
"""

from dataclasses import dataclass

from proa_engine.config import EngineConfig
from proa_engine.worker.host import HostMemory

# Outside of a container other programs live on the machine too.
_SHARE_OF_MACHINE = 0.5


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Sizes that decide how far memory reaches, on one rank."""

    block_size: int  # tokens
    block_bytes: int  # of all layers together
    max_model_len: int
    max_num_seqs: int

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def most_useful_blocks(self) -> int:
        """With this many, every slot holds a request of the full length."""
        return self.blocks_per_request * self.max_num_seqs


def cpu_budget(memory: HostMemory, *, utilization: float, ranks_here: int, workspace: int) -> int:
    """Bytes for one rank's KV cache on a CPU, where `ranks_here` ranks share the container or machine.

    `workspace` is what a step needs beside it. May be negative: nothing is left.
    """
    if memory.limit is None:
        return int(memory.available * _SHARE_OF_MACHINE) // ranks_here - workspace
    share = int(memory.limit * utilization) // ranks_here - memory.process
    return min(share, memory.available // ranks_here) - workspace


def given_blocks(config: EngineConfig, layout: CacheLayout) -> int | None:
    """The number of blocks that the configuration names, by itself or in bytes; None where it leaves it open."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // layout.block_bytes
    return None


def check_room(num_blocks: int, layout: CacheLayout) -> None:
    """Raise `ValueError` unless one request of the full length fits."""
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
    """Most bytes that one rank's weights may take on a CPU where `ranks_here` ranks share the container or machine.

    `memory` is that before any of them has loaded.
    """
    limit = memory.available if memory.limit is None else min(memory.limit, memory.available)
    return limit // ranks_here


def check_weights(weight_bytes: int, room: int) -> None:
    """Raise `ValueError` where the weights alone are more than there is room for."""
    if weight_bytes > room:
        raise ValueError(
            f"the model's weights take {_gib(weight_bytes)} on this rank, but it has {_gib(room)} of memory: give the "
            "engine more, take a smaller dtype or a smaller model, or more ranks in containers of their own "
            "(tensor_parallel_size)"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
