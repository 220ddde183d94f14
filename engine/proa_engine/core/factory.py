"""make_core: an EngineCore from plain choices, for the server, the offline engine and tests."""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from proa_engine.core.engine_core import EngineCore
from proa_engine.core.executor import Executor
from proa_engine.core.kv_cache_manager import BlockHashFunction, KVCacheManager
from proa_engine.core.scheduler import Scheduler, SchedulerConfig


def make_core(
    executor: Executor,
    *,
    hash_block: BlockHashFunction,
    root_hash: bytes,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_waiting_requests: int,
    eos_token_ids: frozenset[int],
    enable_prefix_caching: bool = True,
    async_scheduling: bool = True,
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
    num_speculative_tokens: int = 0,
    block_order: Sequence[int] | None = None,
    clock: Callable[[], float] = time.time,
) -> EngineCore:
    """Raises `ValueError` naming the choice that cannot be.

    `hash_block` and `root_hash` name block contents, so that others can tell what the cache holds; `block_order` is
    the order in which blocks are first given out.
    """
    manager = KVCacheManager(
        num_blocks=num_gpu_blocks,
        block_size=block_size,
        hash_block=hash_block if enable_prefix_caching else None,
        root_hash=root_hash,
        block_order=block_order,
    )
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting_requests=max_waiting_requests,
        policy=scheduling_policy,
        async_scheduling=async_scheduling,
        num_speculative_tokens=num_speculative_tokens,
    )
    return EngineCore(Scheduler(config, manager, eos_token_ids=eos_token_ids), executor, clock=clock)
