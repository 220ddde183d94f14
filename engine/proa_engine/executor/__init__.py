"""Executors: run the scheduler's outputs on the workers. Torch is imported only after the thread count is set."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from proa.imports import importing
from proa_engine.config import EngineConfig
from proa_engine.worker.compile_pool import begin_compile_pool, use_compile_cache
from proa_engine.worker.host import set_thread_variables

if TYPE_CHECKING:
    from proa_engine.executor.uniproc import UniProcExecutor


def make_executor(config: EngineConfig, log: Callable[[str], None]) -> "UniProcExecutor":
    """Load the model on all ranks, size the KV cache and warm up. Returns when the executor can run steps.

    `log` is called with lines about the progress. Raises `ValueError` if the configuration cannot work on this machine,
    and `ExecutorFailed` if a rank fails while starting.
    """
    if config.node_rank:
        raise ValueError(f"node_rank must be 0 for an engine: node {config.node_rank} is run by `proa-engine serve`")
    set_thread_variables(config.ranks_per_node)
    use_compile_cache(config)
    compile_pool = begin_compile_pool(config)
    try:
        with importing():
            executor = _executor_class(config)
        return executor(config, log, compile_pool)
    except BaseException:
        if compile_pool is not None:
            compile_pool.close()
        raise


def _executor_class(config: EngineConfig) -> "type[UniProcExecutor]":
    if config.num_ranks == 1:
        from proa_engine.executor.uniproc import UniProcExecutor

        return UniProcExecutor
    from proa_engine.executor.multiproc import MultiProcExecutor

    return MultiProcExecutor
